"""A process that was dealt GPUs uses them or ends by name; one that was dealt none runs on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from schema.util.gpus import (
    VARIABLE,
    UnusableGpuError,
    dealt_gpus,
    driver_version,
    least_driver,
    reason,
    require_dealt_gpus,
    variable_for,
)

TOO_OLD = """The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by \
downloading and installing a new version.
"""


def refuse() -> None:
    raise RuntimeError(TOO_OLD)


def test_only_a_process_with_gpus_is_told_of_them():
    assert variable_for(0) == {}
    assert [dealt_gpus(variable_for(gpus)) for gpus in (0, 1, 8)] == [0, 1, 8]
    assert dealt_gpus({VARIABLE: "many"}) == 0


def test_a_process_without_dealt_gpus_asks_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    require_dealt_gpus(refuse, "13.0")


def test_dealt_gpus_that_cannot_be_opened_end_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "2")
    require_dealt_gpus(lambda: None, "13.0")
    with pytest.raises(UnusableGpuError, match=r"dealt 2 GPUs .* too old .* CUDA 13\.0 needs 580 or newer"):
        require_dealt_gpus(refuse, "13.0")


def test_the_reason_is_one_line_with_both_drivers():
    text = reason(TOO_OLD, "13.0", "535.104.05")
    assert text.endswith("(the driver is 535.104.05, CUDA 13.0 needs 580 or newer)")
    assert "\n" not in text
    assert reason("", "99.1", "900.1") == "no reason given (the driver is 900.1)"
    assert reason("Torch not compiled with CUDA enabled", None).endswith("(it is built without CUDA)")


@pytest.mark.parametrize(("cuda", "driver"), [("13.0", "580"), ("12.8", "525"), ("11.8", "450"), ("99.0", None)])
def test_each_cuda_has_its_oldest_driver(cuda: str, driver: str | None):
    assert least_driver(cuda) == driver


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@host)\n",
         "580.65.06"),
        ("something else\n", None),
    ],
)  # fmt: skip
def test_the_driver_is_read_from_the_kernel(tmp_path: Path, text: str, version: str | None):
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text(text + "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    assert driver_version(file) == version
