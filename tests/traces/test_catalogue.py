"""The catalogue lists what can be replayed, and every choice under conf/trace is one that works."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import yaml

from harness.config.schema import TraceConfig, TraceFormat
from traces.catalogue import catalogue, licence_of
from traces.reading import READERS
from traces.synth.generator import CHAT, TABLES

CHOICES = sorted((Path(__file__).parents[2] / "conf" / "trace").glob("*.yaml"))


def test_every_generator_is_listed() -> None:
    assert tuple(entry.name for entry in catalogue() if entry.format == "generated") == TABLES


def test_every_listed_file_has_a_reader_a_licence_and_an_address() -> None:
    files = [entry for entry in catalogue() if entry.format != "generated"]
    assert {entry.format for entry in files} <= set(READERS)
    assert all(entry.licence and entry.where.startswith("https://") for entry in files)


def test_an_unknown_file_has_no_licence_that_could_be_named() -> None:
    assert licence_of("00") == "not known: the checksum is not in the catalogue"


def test_a_choice_says_when_to_choose_it() -> None:
    assert len(CHOICES) > 20
    assert [path.stem for path in CHOICES if not path.read_text().startswith("# Choose ")] == []


def test_a_choice_sets_exactly_the_keys_of_the_schema() -> None:
    keys = {field.name for field in fields(TraceConfig)}
    assert [path.stem for path in CHOICES if set(yaml.safe_load(path.read_text())) != keys] == []


def test_a_choice_names_a_table_or_a_known_format() -> None:
    choices = [yaml.safe_load(path.read_text()) for path in CHOICES]
    generated = [entry["name"] for entry in choices if TraceFormat(entry["format"]) is TraceFormat.generated]
    assert set(generated) <= {*TABLES, CHAT}


def test_the_room_imports_nothing_heavy() -> None:
    modules = (
        "traces.reading, traces.synth.generator, traces.reshape, traces.tokens, traces.analysis.statistics, "
        "traces.catalogue"
    )
    code = (
        f"import sys, {modules}\n"
        "heavy = {'torch', 'transformers', 'scipy', 'pandas', 'matplotlib', 'hydra', 'simpy', 'engine', 'harness'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_name_stands_for_one_trace_alone() -> None:
    names = [entry.name for entry in catalogue()]
    assert sorted(names) == sorted(set(names))
