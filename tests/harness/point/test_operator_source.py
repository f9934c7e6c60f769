"""`cost=operators`: a point of a GPU that is priced from a CSV, checked before it runs."""

from pathlib import Path

import pytest
from tiers import cases

from harness.config.compose import compose_config, normalise
from harness.config.errors import ConfigError
from harness.config.overrides import parse_overrides
from harness.config.schema import CostKind, RunConfig
from harness.point.cost import check_cost, resolve_cost_kind
from harness.point.run import point_identity, run_point
from harness.workload.deployment import deployment_of


def config(*texts: str) -> RunConfig:
    texts = (
        *("measure=false", "model=llama31_8b", "device=h200", "workload.num_requests=6", "cost=operators"),
        *("workload.length_scale=0.1", "cache.pool_blocks=2000", "cache.max_model_len=2048", *texts),
    )
    return normalise(compose_config([axis.settings[0] for axis in parse_overrides(texts)]))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "mine.csv"
    rows = [
        f"h200,decode,{rows},{context},32,8,128,{9 + 0.2 * rows + rows * context * 4096 / 4.4e6}"
        for rows in (1, 4, 16)
        for context in (16, 256, 4096)
    ]
    file.write_text("device,op,rows,context,heads,kv_heads,head_dim,us\n" + "\n".join(rows) + "\n")
    return file


def test_a_point_is_priced_from_the_table_and_says_so(table: Path) -> None:
    point = config(f"cost.operators={table}")
    check_cost(deployment_of(point))
    cost = run_point(point).record.cost
    assert (cost["kind"], cost["name"]) == ("operators", "h200")
    assert cost["provenance"]["decode shapes"] == 9
    assert cost["extrapolated"]["steps"] >= 0


def test_auto_takes_the_table_that_is_named(table: Path) -> None:
    assert (
        resolve_cost_kind(deployment_of(config("cost=auto", f"cost.operators={table}"))) is CostKind.operators
    )


def test_a_table_that_is_not_named_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"cost\.operators: missing: cost=operators reads a table"):
        check_cost(deployment_of(config()))


def test_a_table_of_other_devices_is_refused_before_the_point_runs(table: Path) -> None:
    with pytest.raises(ConfigError, match="no row of device b200; its devices are: h200"):
        check_cost(deployment_of(config(f"cost.operators={table}", "device=b200")))


@cases(
    ("words", "has"),
    [
        (("model=gemma3_27b",), "layers that see 1,024 tokens"),
        (("model=deepseek_v2_lite",), "latent vectors"),
        (("model=gemma3_27b", "cache.max_model_len=1024"), ""),
    ],
    day=1,
)
def test_layers_that_do_not_read_every_token_have_no_timed_attention(
    words: tuple[str, ...], has: str
) -> None:
    """Timings of whole attention were taken for theirs: 2.6 times the roofline's at 27 B, 4.6 with latent vectors."""
    asked = config("cost.operators=/no/such/table.csv", *words)
    message = rf"cost\.kind: operators, but .* has {has}, and its timings" if has else "cannot read"
    with pytest.raises(ConfigError, match=message):
        check_cost(deployment_of(asked))


def test_another_content_of_the_table_is_another_point(table: Path) -> None:
    point = config(f"cost.operators={table}")
    first = point_identity(point)["operators"]
    table.write_text(table.read_text() + "h200,decode,64,4096,32,8,128,300\n")
    assert point_identity(point)["operators"] != first
