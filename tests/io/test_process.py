"""What concerns the whole process: forks, its end, refused io_uring, memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import processes


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return processes.run(program, *arguments, warnings="always")


FORK = """
import os, sys, torch, zoo.io
handle = zoo.io.Handle()
handle.pwrite(torch.zeros(10), sys.argv[1])
slow = zoo.io.Handle(backend=zoo.io.Mock(faults=(zoo.io.Fault(delay_s=1.0, times=1),)))
future = slow.async_pwrite(torch.zeros(10), sys.argv[1])
child = os.fork()
if child == 0:
    for use in (lambda: handle.pwrite(torch.zeros(10), sys.argv[1]), handle.wait, future.wait, slow.close):
        try:
            use()
        except RuntimeError as error:
            assert "belongs to process" in str(error) and "make an engine after the fork" in str(error), error
        else:
            os._exit(3)
    zoo.io.Handle().pwrite(torch.ones(10), sys.argv[1])
    del handle, slow, future
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert future.wait().num_bytes == 40
handle.pwrite(torch.ones(10), sys.argv[1])
back = torch.zeros(10)
handle.pread(back, sys.argv[1])
assert back.eq(1).all()
"""


def test_a_forked_child_gets_a_sentence_not_a_hang(folder: Path) -> None:
    done = run(FORK, folder / "f")
    assert done.returncode == 0, done.stderr


# glibc keeps the stacks of the parent's threads for the child's: one of these may have the number of one of those.
FORK_AND_DROP = """
import gc, os, sys, torch, zoo.io
handle = zoo.io.Handle(num_threads=8)
child = os.fork()
if child == 0:
    other = zoo.io.Handle(num_threads=8)
    other.pwrite(torch.ones(10), sys.argv[1])
    del handle
    gc.collect()
    other.pwrite(torch.ones(10), sys.argv[1])
    other.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
handle.pwrite(torch.ones(10), sys.argv[1])
"""


def test_a_forked_child_drops_its_parents_handle_and_keeps_its_own(folder: Path) -> None:
    done = run(FORK_AND_DROP, folder / "f")
    assert done.returncode == 0, done.stderr


# Operations of dropped futures end on threads of the engine, which let go of tensors; a child is to find no lock held.
FORK_UNDER_FIRE = """
import os, sys, threading, time, torch, zoo.io
handle, over = zoo.io.Handle(block_size=4096, queue_depth=32), False

def fire():
    with handle.open(sys.argv[1], "w") as file:
        for k in range(1 << 60):
            handle.async_pwrite(torch.zeros(64, dtype=torch.uint8), file, 64 * (k % 50))
            if k % 200 == 0:
                handle.wait()
            if over:
                return

threads = [threading.Thread(target=fire) for _ in range(2)]
for thread in threads:
    thread.start()
hung = []
for number in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        assert zoo.io.crc32c(torch.zeros(3)) >= 0
        os._exit(0)
    end = time.monotonic() + 5
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            hung.append(number)
            break
        time.sleep(0.0005)
    if hung:
        break
over = True
for thread in threads:
    thread.join()
print(hung)
"""


@pytest.mark.slow
def test_a_child_that_is_forked_while_operations_end_does_not_hang(folder: Path) -> None:
    done = run(FORK_UNDER_FIRE, folder / "f", 100)
    assert done.stdout.strip() == "[]", done.stderr


END = """
import sys, torch, zoo.io
handle = zoo.io.Handle(backend=zoo.io.Mock(faults=(zoo.io.Fault(delay_s=0.3, times=1),)), block_size=4096)
for k in range(8):
    handle.async_pwrite(torch.full((4096,), k, dtype=torch.uint8), sys.argv[1], 4096 * k)
"""


@pytest.mark.slow
@pytest.mark.long
def test_the_end_of_the_process_waits_for_writes(folder: Path) -> None:
    command = [sys.executable, "-W", "always", "-c", END, str(folder / "f")]  # a new one: this is about how it ends
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "8 operations in flight" in done.stderr
    assert (folder / "f").read_bytes() == b"".join(bytes([k]) * 4096 for k in range(8))


# Refuses io_uring_setup (system call 425) with EPERM and allows everything else, as container runtimes do.
REFUSED = """
import ctypes, logging, struct, sys, torch
logging.basicConfig(level=logging.INFO)
import zoo.io
libc = ctypes.CDLL(None, use_errno=True)
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
for _ in range(2):
    with zoo.io.Handle() as handle:
        assert handle.backend == "threads"
        handle.pwrite(torch.arange(100_000), sys.argv[1])
        back = torch.empty(100_000, dtype=torch.int64)
        handle.pread(back, sys.argv[1])
        assert torch.equal(back, torch.arange(100_000))
try:
    zoo.io.Handle(backend="uring")
except zoo.io.UnavailableError as error:
    print(error)
"""


def test_refused_io_uring_becomes_threads_and_is_said_once(folder: Path) -> None:
    done = run(REFUSED, folder / "f")
    if done.returncode == 77:
        pytest.skip("seccomp filters cannot be set here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "io_uring is refused by the kernel: Operation not permitted (errno 1); use the backend"
    )
    assert done.stderr.count("transfers run on 8 blocking threads") == 1


UNPRIVILEGED = """
import logging, os, resource, sys, torch
logging.basicConfig(level=logging.INFO)
import zoo.io
os.chmod(os.path.dirname(sys.argv[1]), 0o777)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
os.setgid(65534), os.setuid(65534)
tensor = torch.randn(1_000_000)
with zoo.io.Handle(backend="uring") as handle:
    handle.pwrite(tensor, sys.argv[1], 64)
    back = torch.empty_like(tensor)
    handle.pread(back, sys.argv[1], 64)
    assert torch.equal(back, tensor)
    assert handle.stats().fixed_transfers == 0 or handle.stats().bounced_bytes == 0
"""


def test_a_small_limit_of_locked_memory_is_said_and_nothing_else(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("the limit does not bind, or cannot be lowered, without being root first")
    done = run(UNPRIVILEGED, folder / "f")
    if "io_uring is refused" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("another user may not use io_uring, or not reach this folder")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("could not be registered with the ring") == 1


INTERRUPT = """
import os, signal, sys, threading, time, torch, zoo.io
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
with zoo.io.Handle(backend=zoo.io.Mock(faults=(zoo.io.Fault(delay_s=2.0, times=1),))) as handle:
    future = handle.async_pwrite(torch.ones(10), sys.argv[1])
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    try:
        future.wait()
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - begun < 1.5)
    print(future.wait().num_bytes)
"""


def test_ctrl_c_ends_a_wait_and_the_operation_goes_on(folder: Path) -> None:
    done = run(INTERRUPT, folder / "f")
    assert done.stdout.split() == ["interrupted", "True", "40"], done.stderr


CLOSE = """
import os, signal, sys, threading, time, torch, zoo.io
signal.signal(signal.SIGINT, signal.default_int_handler)
handle = zoo.io.Handle(backend=zoo.io.Mock(faults=(zoo.io.Fault(delay_s=2.0, times=1),)))
future = handle.async_pwrite(torch.ones(10), sys.argv[1])
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
begun = time.monotonic()
try:
    handle.close()
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - begun < 1.5, handle.closed, future.done())
open(sys.argv[1] + ".kept", "wb").write(b"kept")
try:
    handle.write(torch.ones(0), sys.argv[1] + ".kept")
except ValueError as error:
    print(error, open(sys.argv[1] + ".kept").read())
handle.close()
print(handle.closed, future.wait().num_bytes)
"""


def test_ctrl_c_ends_a_close_which_may_be_called_again(folder: Path) -> None:
    done = run(CLOSE, folder / "f")
    assert done.stdout.splitlines() == [
        "interrupted True False False",
        "the handle is closed; make a new one kept",
        "True 40",
    ], done.stderr


TOO_LARGE = """
import os, resource, signal, sys, torch, zoo.io
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
for backend in ("uring", "threads"):
    with zoo.io.Handle(backend=backend) as handle:
        handle.pwrite(torch.zeros(1 << 14), sys.argv[1])
        try:
            handle.pwrite(torch.zeros(1 << 20), sys.argv[1], 4096)
        except zoo.io.TransferError as error:
            print(error.errno, "the file system's or the process's limit" in str(error))
    facts = os.stat(sys.argv[1])
    print(facts.st_size, facts.st_blocks * 512 <= 1 << 17)
"""


def test_a_file_that_would_be_too_large_takes_no_space_and_ends_no_process(folder: Path) -> None:
    done = run(TOO_LARGE, folder / "f")
    assert done.stdout.split() == ["27", "True", "65536", "True"] * 2, done.stderr


NO_MEMORY = """
import resource, sys, torch, zoo.io
handle, tensor = zoo.io.Handle(block_size=1 << 30, bounce_bytes=0), torch.zeros(1 << 16, dtype=torch.uint8)[1:]
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
for k in range(3):
    handle.async_pwrite(tensor, sys.argv[1], k << 20)
try:
    handle.wait()
except zoo.io.PoolExhaustedError as error:
    print(error, len(error.others))
handle.close()
"""


def test_what_else_failed_is_told_whatever_failed_first(folder: Path) -> None:
    done = run(NO_MEMORY, folder / "f")
    assert done.stdout.strip() == "2147483648 bytes of memory: Cannot allocate memory 2", done.stderr


# In a mount namespace of its own, where nothing is in /proc.
WITHOUT_PROC = """
import ctypes, os, sys, torch, zoo.io
libc = ctypes.CDLL(None)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(77)
if libc.mount(b"none", b"/proc", b"tmpfs", 0, None):
    sys.exit(77)
path = sys.argv[1]
with zoo.io.Handle() as handle:
    for what in ("there", "removed", "replaced"):
        with handle.open(path, "w") as file:
            if what == "removed":
                os.unlink(path)
            elif what == "replaced":
                open(path + ".other", "wb").write(b"other")
                os.rename(path + ".other", path)
            try:
                handle.pwrite(torch.ones(3, dtype=torch.uint8), file)
            except zoo.io.TransferError as error:
                print(what, error)
            print(what, os.path.exists(path) and open(path, "rb").read())
"""


def test_the_ragged_ends_of_a_file_never_go_to_another_one(folder: Path) -> None:
    done = run(WITHOUT_PROC, folder / "f")
    if done.returncode == 77:
        pytest.skip("no right to a mount namespace")
    assert done.stdout.splitlines() == [
        r"there b'\x01\x01\x01'",
        f"removed open {folder / 'f'}: No such file or directory (errno 2); a read needs an existing file, a write an "
        "existing folder",
        "removed False",
        f"replaced open {folder / 'f'}: No such file or directory (errno 2); a read needs an existing file, a write an "
        "existing folder",
        "replaced b'other'",
    ], done.stderr


LEAK = """
import resource, sys, torch, zoo.io

def resident():
    # Not of files: a forked process maps their pages one by one, as it comes to use them.
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * int(status["RssAnon"].split()[0])

ordinary, errors = torch.ones(20_001, dtype=torch.uint8), 0
with zoo.io.Handle(block_size=8192) as handle:
    handle.write(torch.zeros(1 << 20, dtype=torch.uint8), sys.argv[1])

    def some(count):
        global errors
        for k in range(count // 5):
            pooled = handle.empty(30_000 + k % 7, dtype=torch.uint8)
            handle.async_pwrite(pooled, sys.argv[1], 64 * (k % 100))
            handle.async_pwrite(ordinary, sys.argv[1], 100_000 + k % 100, checksum=True)
            handle.async_pread(ordinary.clone(), sys.argv[1], k % 100)
            with handle.open(sys.argv[1]) as file:
                handle.pread(pooled, file, 300_000)
            try:
                handle.pread(ordinary, sys.argv[1], 1 << 20)
            except zoo.io.UnexpectedEndError:
                errors += 1
            if k % 20 == 0:
                handle.wait()
        handle.wait()

    some(2000)
    before = resident()
    some(10_000)
    grown = resident() - before
    assert errors == 2400 and handle.stats().in_flight == 0
    assert handle.pool.stats().buffers <= 1
print(grown)
"""


@pytest.mark.dear
def test_memory_is_flat_over_ten_thousand_operations(folder: Path) -> None:
    done = run(LEAK, folder / "f")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1 << 20, f"grew by {done.stdout.strip()} bytes"
