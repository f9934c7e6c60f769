"""`model.kv_dtype` reaches both sides: the engine's pool, and every size that is counted in bytes."""

import pytest

from harness.config.compose import compose_config
from harness.config.overrides import parse_overrides
from harness.workload.deployment import deployment_of, model_shape

TINY = ("model=tiny_llama", "workload.num_requests=3", "cache.pool_tokens=1024")


def config(*overrides):
    return compose_config(axis.settings[0] for axis in parse_overrides((*TINY, *overrides)))


@pytest.mark.parametrize(("dtype", "share"), [("float32", 4), ("bfloat16", 2)])
def test_a_token_takes_a_byte_a_number_and_weights_stay_as_they_are(dtype, share):
    wide, narrow = (
        config(f"model.dtype={dtype}", f"model.kv_dtype={kind}") for kind in ("model", "fp8_e4m3")
    )
    assert (
        deployment_of(wide).pool.kv_bytes_per_token == share * deployment_of(narrow).pool.kv_bytes_per_token
    )
    assert model_shape(wide.model).weight_bytes == model_shape(narrow.model).weight_bytes


def test_a_device_holds_as_many_more_tokens():
    sized = [
        deployment_of(
            config("model=llama3_8b", "device=h200", "cache.pool_tokens=null", f"model.kv_dtype={kind}")
        ).pool
        for kind in ("model", "fp8_e4m3")
    ]
    assert sized[1].tokens == pytest.approx(2 * sized[0].tokens, rel=1e-3)


def test_the_measured_side_keeps_8_bits_and_audits_them():
    from harness.measure.engine import measure
    from harness.workload.point import resolve

    asked = config("model.kv_dtype=fp8_e4m3", "engine.audit=full", "engine.device=cpu")
    run = measure(resolve(asked), seed=0)
    assert run.audits > 5
    assert run.log.kv_bytes_per_token == 2 * 4 * 4 * 32


def test_another_type_is_refused_with_those_that_exist(capsys):
    from harness.cli.main import main

    assert main(["run", *TINY, "model.kv_dtype=int4"]) == 2
    assert "fp8_e4m3" in capsys.readouterr().err
