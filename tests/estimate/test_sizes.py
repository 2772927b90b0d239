"""`ckpt/base/text.py`, `ckpt/containers/torchfile/scalars.py`: human-readable sizes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.base.text import parse_size, show_size
from ckpt.containers.torchfile.scalars import read_scalar, scalar_from_bytes
from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.plan.dtypes import BFLOAT16, BY_NAME, FLOAT32, INT64
from ckpt.plan.tensors import Extent


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1B", 1),
        ("1000000 B", 1_000_000),
        ("7B", 7),
        ("5GB", 5_000_000_000),
        ("5gb", 5_000_000_000),
        ("5G", 5_000_000_000),
        ("512MiB", 512 << 20),
        ("1.5 GB", 1_500_000_000),
        (" 2 TiB ", 2 << 40),
        ("0.5kb", 500),
        ("9007199254740993B", 9007199254740993),  # more than a float holds
        ("1.000000000000000001TB", 1_000_000_000_000),
    ],
)
def test_what_is_a_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "4",
        "1000000",
        "0GB",
        "-1",
        "+1",
        "GB",
        "1XB",
        "1 G B",
        "1,5GB",
        "1e9",
        ".5GB",
        "1.GB",
        "0.4",
        "nan",
        "inf",
        "٥GB",
        "9" * 400,
    ],
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12_345, "12.3 kB"),
        (999_949, "999.9 kB"),
        (999_960, "1.00 MB"),
        (1_500_000_000, "1.50 GB"),
        (123_000_000_000_000, "123.0 TB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_shown_as_disks_are_sold(count: int, text: str) -> None:
    assert show_size(count) == text


@given(st.integers(0, 10**16))
def test_what_is_shown_is_a_size_of_about_that(count: int) -> None:
    text = show_size(count)
    if count:
        assert abs(parse_size(text) - count) <= count * 0.0051


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("float64", "<d", 1e300),
        ("float32", "<f", 0.5),
        ("float16", "<e", -2.0),
        ("int64", "<q", -(2**63)),
        ("uint64", "<Q", 2**64 - 1),
        ("int8", "<b", -5),
        ("bool", "<?", True),
    ],
)
def test_a_number_is_read(tmp_path: Path, name: str, code: str, value: float) -> None:
    dtype = BY_NAME[name]
    path = tmp_path / "step.bin"
    path.write_bytes(b"....." + struct.pack(code, value) + b"...")
    for shape in ((), (1,), (1, 1)):
        assert read_scalar(Extent.contiguous(str(path), 5, dtype, shape)) == value


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    assert scalar_from_bytes(struct.pack("<f", -3.5)[2:], BFLOAT16) == -3.5


def test_what_is_no_single_number(tmp_path: Path) -> None:
    path = tmp_path / "step.bin"
    path.write_bytes(bytes(6))
    with pytest.raises(CorruptError, match="single number"):
        read_scalar(Extent.contiguous(str(path), 0, FLOAT32, (2,)))
    with pytest.raises(CorruptError, match="single number"):
        read_scalar(Extent.contiguous(str(path), 0, FLOAT32, (0,)))
    with pytest.raises(CorruptError, match="ends inside"):
        read_scalar(Extent.contiguous(str(path), 0, INT64, ()))
    with pytest.raises(CorruptError, match="complex64 is not a plain number"):
        scalar_from_bytes(bytes(8), BY_NAME["complex64"])
    with pytest.raises(NotFoundError):
        read_scalar(Extent.contiguous(str(tmp_path / "missing.bin"), 0, FLOAT32, ()))
