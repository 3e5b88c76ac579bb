"""Hardware files: what is written is read, and what is none is refused with what is wrong in it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.cost import Channel, Device, Hardware, HardwareError, Link, Measured, Tile, hardware_names, read_hardware
from zoo.cost.hardware import CHANNELS

POSITIVE = st.floats(1e-9, 1e18)
LINKS = st.builds(
    Link, latency_s=st.floats(0, 1), bytes_per_s=POSITIVE,
    all_reduce=st.dictionaries(st.integers(2, 64), st.lists(
        st.tuples(POSITIVE, POSITIVE), min_size=1, unique_by=lambda point: point[0],
    ).map(sorted).map(tuple)),
)  # fmt: skip
DEVICES = st.builds(
    Device, name=st.text(max_size=9), memory_bytes=st.integers(0, 10**12), bytes_per_s=POSITIVE, reached=POSITIVE,
    flops_per_s=st.dictionaries(st.sampled_from(["bf16", "fp32"]), POSITIVE, min_size=1), units=st.integers(1, 999),
    tiles=st.lists(st.builds(Tile, rows=st.integers(1, 512), columns=st.integers(1, 512), reached=POSITIVE),
                   min_size=1).map(tuple),
    fill=st.floats(0, 1e4), launch_s=st.floats(0, 1),
    products=st.dictionaries(st.sampled_from(["bf16"]), st.lists(st.builds(
        Measured, m=st.integers(1, 9999), n=st.integers(1, 9999), k=st.integers(1, 9999), flops_per_s=POSITIVE,
    )).map(tuple)),
)  # fmt: skip


@given(
    st.builds(
        Hardware, name=st.text(max_size=9), device=DEVICES, ranks_per_node=st.integers(1, 99), inside=LINKS,
        between=LINKS, adapters=st.integers(1, 9),
        channels=st.dictionaries(
            st.sampled_from(CHANNELS), st.builds(Channel, latency_s=st.floats(0, 1), bytes_per_s=POSITIVE)
        ),
        sources=st.lists(st.text(max_size=9)).map(tuple),
    )
)  # fmt: skip
def test_a_file_has_it_all(given_: Hardware) -> None:
    assert Hardware.from_dict(json.loads(json.dumps(given_.to_dict()))) == given_


def test_a_channel_takes_its_latency_and_its_bytes() -> None:
    assert Channel(latency_s=0.5, bytes_per_s=4.0).seconds(8) == 2.5


@pytest.mark.parametrize("name", hardware_names())
def test_known_hardware_is_complete(name: str, tmp_path: Path) -> None:
    found = read_hardware(name)
    assert found.name == name
    assert found.sources
    assert found.device.peak("bf16") > 1e12
    with pytest.raises(HardwareError, match="states no FLOP/s for 'int3'"):
        found.device.peak("int3")
    found.write(tmp_path / "mine.json")
    assert read_hardware(tmp_path / "mine.json") == found


def _changed(**changes: Any) -> dict[str, Any]:
    document = read_hardware("h100-80").to_dict()
    for where, value in changes.items():
        at: Any = document
        *path, last = where.split("__")
        for part in path:
            at = at[part]
        if value is None:
            del at[last]
        else:
            at[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "hardware is \\[\\], where an object is expected"),
        (_changed(adapters="8"), "adapters is '8', where a number is expected"),
        (_changed(adapters=0), "adapters is 0, where a number above 0 is expected"),
        (_changed(adapters=1.5), "adapters is 1.5, where a whole number is expected"),
        (_changed(device__fill=-1), "fill is -1, where a number of at least 0 is expected"),
        (_changed(device__units=float("inf")), "units is inf"),
        (_changed(device__bytes_per_s=None), "it has no 'bytes_per_s'"),
        (_changed(device__flops_per_s={"bf16": True}), "flops_per_s of bf16 is True"),
        (_changed(device__flops_per_s={}), "flops_per_s of its device is empty"),
        (_changed(device__tiles=[]), "its device has no tiles"),
        (_changed(device__launch_s=-1.0), "launch_s is -1.0, where a number of at least 0 is expected"),
        (_changed(channels={"tape": {}}), "channels has 'tape'; it may have to_device, to_host, disk_read, disk_write"),
        (_changed(channels={"to_host": {"latency_s": 0.0}}), "it has no 'bytes_per_s'"),
        (_changed(speed=3), "hardware has 'speed'; it may have name, device"),
    ],
)
def test_what_is_no_hardware_is_refused(document: Any, said: str) -> None:
    with pytest.raises(HardwareError, match=f"this is no hardware file: {said}"):
        Hardware.from_dict(document)


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="no hardware is named 'a1000', and no file is: known are a100-40"):
        read_hardware("a1000")
    (tmp_path / "text").write_text("{")
    with pytest.raises(HardwareError, match="is no JSON"):
        read_hardware(tmp_path / "text")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(HardwareError, match="17,825,792 bytes"):
        read_hardware(tmp_path / "large")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("device", "bytes_per_s"), 10**400, "bytes_per_s is 10+, where a number is expected"),
        (("device", "name"), 5, "name of its device is 5, where a text is expected"),
        (("name",), ["x"], r"name of its hardware is \['x'\], where a text"),
        (("sources",), "a datasheet", "sources is 'a datasheet', where a list of texts"),
        (("inside", "all_reduce"), {"4": []}, "all_reduce of 4 has 0 points; there is at least one"),
        (("inside", "all_reduce"), {"4": [[1e9, 1.0], [1.0, 2e-5]]}, "all_reduce of 4 has 2 points.*their bytes rise"),
        (("inside", "all_reduce"), {"4": [[1.0, -2.0]]}, "seconds in all_reduce of 4 is -2.0"),
        (("between", "all_reduce"), {"4": [[math.nan, 1.0]]}, "bytes in all_reduce of 4 is nan"),
    ],
)
def test_values_that_no_machine_has(place: tuple[str, ...], value: Any, said: str) -> None:
    document = read_hardware("a100-80").to_dict()
    inner = document
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(HardwareError, match=f"this is no hardware file: {said}"):
        Hardware.from_dict(document)


def test_names_and_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="no hardware is named 'xxx"):
        read_hardware("x" * 5000)
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(HardwareError, match="is no JSON"):
        read_hardware(deep)
