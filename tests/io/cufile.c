// Stands in for libcufile and for the part of the CUDA runtime that goes with it: memory of the "GPU" is memory of the host.
// It moves the bytes, refuses what the library refuses, counts what it is asked for, and fails on order (stub_set).
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
  int code, cuda;
} Status;
typedef struct {
  int kind;
  union {
    int fd;
    void *handle;
  } descriptor;
  const void *operations;
} Description;
typedef struct {
  int fd, plain;
} Known;

// What is set: "no_gpu"; "open", "file", "memory": a code that the call returns. "move": what a read or write returns instead of
// moving, after "after" of them. "most": bytes that one moves at the most. "sleep": microseconds that it takes.
enum { GPUS, OPEN, FILE_, MEMORY, MOVE, AFTER, MOST, SLEEP, SETTINGS };
static const char *const SETTING[SETTINGS] = {"no_gpu", "open", "file", "memory", "move", "after", "most", "sleep"};
// What is counted: calls; "at once": most transfers at one time; "within": transfers in registered memory; "faults": uses that
// the library forbids.
enum { OPENED, CLOSED, FILES, FORGOTTEN, MEMORIES, FREED, MOVES, AT_ONCE, WITHIN, EVENTS, FAULTS, COUNTS };
static const char *const COUNT[COUNTS] = {"opened", "closed", "files", "files forgotten", "memories", "memories forgotten",
                                          "moves", "at once", "within", "events", "faults"};
static long settings[SETTINGS], counts[COUNTS], now;
static struct {
  const char *start;
  size_t length;
} known[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device = -1;

static long find(const char *const *names, int count, const char *name) {
  for (int k = 0; k < count; k++)
    if (!strcmp(names[k], name)) return k;
  abort();
}
void stub_set(const char *name, long value) { settings[find(SETTING, SETTINGS, name)] = value; }
long stub_count(const char *name) { return __atomic_load_n(&counts[find(COUNT, COUNTS, name)], __ATOMIC_SEQ_CST); }
void stub_reset(void) {
  memset(settings, 0, sizeof settings);
  memset(counts, 0, sizeof counts);
}
static long add(int which) { return __atomic_add_fetch(&counts[which], 1, __ATOMIC_SEQ_CST); }
static Status status(int code) { return (Status){code, code == 5011 ? 201 : 0}; }
static int is_open(void) { return counts[OPENED] > counts[CLOSED]; }

Status cuFileDriverOpen(void) {
  if (!getenv("CUFILE_LOGFILE_PATH")) fclose(fopen("cufile.log", "a"));  // as the library does
  if (settings[OPEN]) return status((int)settings[OPEN]);
  if (is_open()) add(FAULTS);
  add(OPENED);
  return status(0);
}
Status cuFileDriverClose(void) {
  if (!is_open() || counts[FILES] != counts[FORGOTTEN] || counts[MEMORIES] != counts[FREED]) add(FAULTS);
  add(CLOSED);
  return status(0);
}
Status cuFileHandleRegister(void **handle, Description *description) {
  if (!is_open()) return status(5001);
  if (settings[FILE_]) return status((int)settings[FILE_]);
  if (description->kind != 1 || description->operations) return status(5022);
  int fd = description->descriptor.fd, flags = fcntl(fd, F_GETFL);
  if (flags < 0) return status(5018);
  if (!(flags & O_DIRECT)) return status(5020);
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  Known *made = malloc(sizeof *made);
  // Any address and length goes, as in the library: through the page cache.
  *made = (Known){fd, open(path, (flags & O_ACCMODE) | O_CLOEXEC)};
  *handle = made;
  add(FILES);
  return status(0);
}
void cuFileHandleDeregister(void *handle) {
  Known *file = handle;
  if (fcntl(file->fd, F_GETFD) < 0 || !is_open()) add(FAULTS);
  close(file->plain);
  free(file);
  add(FORGOTTEN);
}
Status cuFileBufRegister(const void *start, size_t length, int flags) {
  if (!is_open() || flags) return status(5001);
  if (settings[MEMORY]) return status((int)settings[MEMORY]);
  if (device < 0) return status(5015);
  int code = 5030;
  pthread_mutex_lock(&lock);
  for (int k = 0; k < 64 && code != 5023; k++)
    if (known[k].start == start) code = 5023;
  for (int k = 0; k < 64 && code == 5030; k++)
    if (!known[k].start) {
      known[k].start = start, known[k].length = length, code = 0;
      add(MEMORIES);
    }
  pthread_mutex_unlock(&lock);
  return status(code);
}
Status cuFileBufDeregister(const void *start) {
  int code = 5024;
  pthread_mutex_lock(&lock);
  for (int k = 0; k < 64; k++)
    if (known[k].start == start) known[k].start = NULL, code = 0, add(FREED);
  pthread_mutex_unlock(&lock);
  if (code) add(FAULTS);
  return status(code);
}
static ssize_t move(void *handle, char *base, size_t length, off_t at, off_t within, int write) {
  long running = __atomic_add_fetch(&now, 1, __ATOMIC_SEQ_CST), count = add(MOVES);
  while (running > stub_count("at once")) counts[AT_ONCE] = running;
  if (settings[SLEEP]) usleep((useconds_t)settings[SLEEP]);
  ssize_t moved;
  pthread_mutex_lock(&lock);
  int found = 0, inside = 0;
  for (int k = 0; k < 64; k++)
    if (known[k].start == base) found = 1, inside = (size_t)within + length <= known[k].length;
  pthread_mutex_unlock(&lock);
  if (found && inside) add(WITHIN);
  if (settings[MOST] && length > (size_t)settings[MOST]) length = (size_t)settings[MOST];
  if (!is_open()) {
    moved = -5001;
  } else if (device < 0) {
    moved = -5015;
  } else if (within && !(found && inside)) {
    moved = -5014;
  } else if (settings[MOVE] && count > settings[AFTER]) {
    moved = settings[MOVE] < -5000 ? settings[MOVE] : -1;
    errno = (int)-settings[MOVE];
  } else {
    int fd = ((Known *)handle)->plain;
    moved = write ? pwrite(fd, base + within, length, at) : pread(fd, base + within, length, at);
  }
  int kept = errno;
  __atomic_sub_fetch(&now, 1, __ATOMIC_SEQ_CST);
  errno = kept;
  return moved;
}
ssize_t cuFileRead(void *handle, void *base, size_t length, off_t at, off_t within) {
  return move(handle, base, length, at, within, 0);
}
ssize_t cuFileWrite(void *handle, const void *base, size_t length, off_t at, off_t within) {
  return move(handle, (void *)base, length, at, within, 1);
}

int cudaGetDeviceCount(int *count) {
  *count = settings[GPUS] ? 0 : 8;
  return settings[GPUS] ? 35 : 0;
}
int cudaGetDevice(int *number) {
  *number = device < 0 ? 0 : device;
  return 0;
}
int cudaSetDevice(int number) {
  device = number;
  return number > 7 ? 101 : 0;
}
int cudaEventSynchronize(void *event) {
  if (event) add(EVENTS);
  return 0;
}
