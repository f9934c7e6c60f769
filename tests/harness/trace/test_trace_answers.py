"""What `trace inspect` answers: traces of sweeps by name, waste by block size, and KV memory of a model."""

import json
from typing import Any

import pytest

from harness.cli.main import main


def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["trace", "inspect", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_trace_that_a_sweep_takes_by_name_can_be_inspected(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, "system_prompts", "--requests", "60")
    assert found["profile"]["reuse"]["ideal_hit_ratio"]


def test_larger_blocks_waste_more_and_reservation_wastes_most(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, "azure_conv", "--requests", "60", "--block-sizes", "8,64")
    paged = found["time-weighted share of allocated slots that is never filled, paged"]
    reserved = found["time-weighted share of allocated slots that is never filled, contiguous"]
    shares = [
        float(text.split()[0]) for text in (paged["blocks of 8"], paged["blocks of 64"], *reserved.values())
    ]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[1] < shares[2]
    instant = found["share of allocated slots that holds no token at an instant, paged"]
    assert shares[0] < float(instant["blocks of 8"].split()[0]) < float(instant["blocks of 64"].split()[0])


def test_the_kv_memory_of_a_model_is_answered_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, "azure_conv", "--requests", "60", "--model", "llama3_8b")
    assert found["KV memory, llama3_8b"]["a token"] == "131,072 bytes"
    windows = inspected(capsys, "azure_conv", "--requests", "60", "--model", "gemma3_12b")
    assert "KV memory, gemma3_12b, windowed layers keeping every token" in windows


def test_calibrations_are_named_once_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "ls"]) == 0
    said = capsys.readouterr().out
    assert "calibrated on Azure" in said
    assert "calibrated on calibrated" not in said
