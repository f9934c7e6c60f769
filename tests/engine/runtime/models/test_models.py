"""Which models run on paged KV, what is known of them beforehand, and which are refused by name."""

import json
import pickle
import subprocess
import sys

import pytest
from tiers import cases

from engine.runtime.errors import ModelError
from engine.runtime.models.spec import ModelSpec, check_model

TINY = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 32, "vocab": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, model_of):
    """A llama saved as a local checkpoint directory."""
    from engine.runtime.models.load import original_model

    folder = tmp_path_factory.mktemp("checkpoint")
    with original_model(model_of()) as model:
        model.save_pretrained(folder)
    return folder


@pytest.fixture(name="model_of", scope="module")
def model_of_fixture():
    from engine.runtime.models.load import load_model

    loaded = load_model(ModelSpec(**TINY))
    return lambda: loaded


def edit_config(folder, target, **values):
    """A copy of the checkpoint whose config.json has other values."""
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | values))
    (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return str(target)


def test_checking_a_model_imports_no_torch():
    code = (
        "import sys; from engine.runtime.models.spec import ModelSpec, check_model; check_model(ModelSpec()); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shapes_are_what_the_layers_send(model_of):
    assert model_of().kv_shapes == (((2, 8), (2, 8)),)
    assert model_of().kv_bytes_per_token == 2 * 2 * 8 * 4


def test_the_seed_names_the_weights():
    from engine.runtime.models.load import load_model

    weights = [load_model(ModelSpec(**TINY, seed=seed)).model.lm_head.weight for seed in (3, 3, 4)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_loading_leaves_the_global_random_state_alone():
    import torch

    from engine.runtime.models.load import load_model

    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    load_model(ModelSpec(**TINY))
    assert torch.rand(1) == expected


def test_a_local_checkpoint_gives_the_tokens_of_the_model_it_was_saved_from(checkpoint, model_of):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0)
    saved = LLM(str(checkpoint)).generate([5, 9, 2], params)
    assert saved[0].outputs == LLM(model_of()).generate([5, 9, 2], params)[0].outputs


def test_the_original_attention_is_put_back_and_taken_away_again(model_of):
    from engine.runtime.attention.layer import IMPLEMENTATION
    from engine.runtime.models.load import original_model

    with original_model(model_of()) as model:
        assert model.config._attn_implementation == model_of().original_attention != IMPLEMENTATION
    assert model.config._attn_implementation == IMPLEMENTATION


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gptj", "cannot replace"),
        ("falcon", "cannot replace"),
        ("bloom", "biases"),
        ("stablelm", "arguments"),
    ],
)
def test_known_bad_families_are_refused_by_name(family, reason):
    with pytest.raises(ModelError, match=f"{family} cannot run on paged KV: .*{reason}"):
        check_model(ModelSpec(family=family))


def test_an_unknown_family_is_refused_with_the_choices():
    with pytest.raises(
        ModelError, match="family 'lama' cannot be built from a shape; choose one of llama, qwen3"
    ):
        check_model(ModelSpec(family="lama"))


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_looks_at_the_whole_batch_is_refused(checkpoint, tmp_path, rope):
    path = edit_config(checkpoint, tmp_path, rope_parameters={"rope_type": rope, "factor": 2.0})
    with pytest.raises(ModelError, match=f"RoPE type '{rope}' is refused"):
        check_model(ModelSpec(path=path))


def test_old_spelling_of_rope_scaling_is_understood(checkpoint, tmp_path):
    path = edit_config(checkpoint, tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(ModelError, match="RoPE type 'dynamic' is refused"):
        check_model(ModelSpec(path=path))


@pytest.mark.nightly
def test_gemma_4_with_the_widths_of_its_configuration_class_gives_the_tokens_of_generate(tmp_path):
    """Heads of 256 and 512 numbers, layers that share K and V, inputs of each layer; read from a checkpoint."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.runtime.llm import LLM, SamplingParams
    from engine.runtime.models.load import load_model, original_model

    sizes = {"vocab_size": 256, "vocab_size_per_layer_input": 256, "hidden_size": 64, "intermediate_size": 96}
    kept = {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "max_position_embeddings": 256}
    no_end = {"sliding_window": 16, "initializer_range": 0.1, "eos_token_id": None}
    config = AutoConfig.for_model("gemma4_text", **sizes, **kept, **no_end)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(ModelSpec(path=str(tmp_path)))
    assert loaded.kv_shapes == ((((4, 256),) * 2,) * 5 + (((4, 512),) * 2,)) * 2
    assert loaded.windows == ((16,) * 5 + (0,)) * 2
    prompt = list(range(7, 47))
    with original_model(loaded) as model:
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    for groups in ("off", "uniform"):
        llm = LLM(loaded, groups=groups, pool_tokens=256, block_size=4, max_num_batched_tokens=16)
        done = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0))
        assert done[0].outputs[0].token_ids == wanted


def test_a_missing_directory_is_no_checkpoint(tmp_path):
    with pytest.raises(ModelError, match="nowhere is not a checkpoint: there is no such directory"):
        check_model(ModelSpec(path=str(tmp_path / "nowhere")))


def test_a_directory_without_config_is_no_checkpoint(tmp_path):
    with pytest.raises(ModelError, match=r"is not a checkpoint: it has no config\.json"):
        check_model(ModelSpec(path=str(tmp_path)))


def test_a_broken_config_is_no_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"is not a checkpoint: config.json: "):
        check_model(ModelSpec(path=str(tmp_path)))


def test_a_config_without_weights_is_no_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="it has no weights"):
        check_model(ModelSpec(path=str(tmp_path)))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_names_more_than_tensors_is_refused_before_anything_runs(tmp_path, protocol):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(subprocess.run, protocol) * 5)
    with pytest.raises(ModelError, match=r"pytorch_model.bin: names .*, which is no tensor"):
        check_model(ModelSpec(path=str(tmp_path)))


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickled_weights_of_torch_are_taken(tmp_path, is_zip):
    import torch

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    weights = {"a": torch.zeros(2), "b": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))}
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    check_model(ModelSpec(path=str(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02", b"not weights"])
def test_a_bin_that_holds_no_weights_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"pytorch_model.bin: no weights of torch"):
        check_model(ModelSpec(path=str(tmp_path)))


def test_weights_that_do_not_load_are_reported_as_such(checkpoint, tmp_path):
    path = edit_config(checkpoint, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    from engine.runtime.models.load import load_model

    with pytest.raises(ModelError, match="incomplete or not a safetensors file: 11 bytes"):
        load_model(ModelSpec(path=path))


def test_weights_that_the_config_asks_for_and_the_files_lack_are_named(checkpoint, tmp_path):
    path = edit_config(checkpoint, tmp_path, num_hidden_layers=2)
    from engine.runtime.models.load import load_model

    with pytest.raises(ModelError, match=r"lacks \d+ of the weights .*layers\.1\."):
        load_model(ModelSpec(path=path))


@pytest.mark.parametrize("name", ["q_proj.bias", "k_proj.weight_scale"])
def test_weights_without_a_place_in_the_model_are_named(name, checkpoint, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    from engine.runtime.models.load import load_model

    path = edit_config(checkpoint, tmp_path)
    beside = {"vision_tower.weight": torch.ones(4), "model.layers.1.mlp.up_proj.weight": torch.ones(4)}
    weights = load_file(tmp_path / "model.safetensors") | beside
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    load_model(ModelSpec(path=path))  # what is beside the model says nothing to it
    more = {f"model.layers.0.self_attn.{name}": torch.ones(32)}
    save_file(weights | more, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"no place for 1 of the weights .*self_attn\.{name}"):
        load_model(ModelSpec(path=path))


def test_a_checkpoints_own_code_never_runs(checkpoint, tmp_path, monkeypatch):
    from engine.runtime.models.load import check_backend, load_model

    names = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    path = edit_config(checkpoint, tmp_path, model_type="own", auto_map=names)
    code = "from transformers import LlamaConfig as C, LlamaForCausalLM as M\nopen({!r}, 'w').close()\n"
    (tmp_path / "own.py").write_text(code.format(str(tmp_path / "ran")))
    monkeypatch.setattr("builtins.input", lambda text: "y")
    check_backend(ModelSpec(path=path), "torch", "cpu", "model")
    with pytest.raises(ModelError, match="does not load"):
        load_model(ModelSpec(path=path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' does not exist; choose float32"),
        ({"heads": 6, "kv_heads": 4}, "6 heads are not a multiple of 4 kv_heads"),
        ({"head_dim": 31}, "even head_dim, found 31"),
        ({"family": "gpt2", "kv_heads": 4}, "gpt2 has one KV head per head"),
    ],
)
def test_impossible_shapes_are_refused(values, message):
    with pytest.raises(ModelError, match=message):
        check_model(ModelSpec(**values))


@pytest.mark.parametrize("family", ["gptj", "stablelm"])
def test_a_model_object_that_ignores_our_attention_is_refused(family, monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.runtime.models import load as module

    shapes = {
        "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        "stablelm": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=64, **shapes[family]))
    if family == "gptj" and model._supports_attention_backend:
        pytest.skip("this transformers routes it through its attention interface (5.17 does not)")
    native = model.config._attn_implementation
    monkeypatch.setattr(module, "check_config", lambda name, config: None)
    with pytest.raises(ModelError, match=r"cannot be replaced|drops extra arguments"):
        module.wrap_model(model, name=family)
    assert model.config._attn_implementation == native


def test_layers_without_a_kv_cache_are_noticed(model_of, monkeypatch):
    from engine.runtime.models.probe import probe_layers

    monkeypatch.setattr(model_of().model.config, "num_hidden_layers", 3)
    with pytest.raises(ModelError, match="called paged attention"):
        probe_layers(model_of().model, "test", 0)


def test_an_option_that_the_kernels_do_not_know_is_refused(model_of):
    import torch

    from engine.runtime.attention.layer import LayerCall
    from engine.runtime.models.probe import ShapeProbe
    from paged_kernels import Scoring

    probe = ShapeProbe()
    layer = model_of().model.model.layers[0].self_attn
    q, kv = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8)
    probe.attend(LayerCall(layer, q, kv, kv, Scoring(1.0), {"position_bias": q, "use_cache": False}))
    assert probe.unsupported == {"position_bias"}


def test_triton_on_the_cpu_is_refused_when_the_runner_is_built(model_of):
    from engine.runtime.runner import Runner
    from paged_kernels import BackendUnavailableError

    with pytest.raises(BackendUnavailableError, match="'cpu'"):
        Runner(model_of(), num_blocks=4, block_size=4, backend="triton")


def test_layers_that_the_triton_kernels_do_not_serve_run_on_torch(model_of, monkeypatch):
    import torch

    from engine.runtime.models.load import demands_of
    from paged_kernels.backends import choose_for_layers

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    (narrow,) = demands_of((model_of(), None), "model")
    assert (narrow.group, narrow.head_dim, narrow.aligned) == (2, 8, False)
    served = narrow._replace(head_dim=128, aligned=True)
    for demands, backend in (((served,), "triton"), ((served, narrow), "torch")):
        assert choose_for_layers("auto", torch.device("cuda"), demands).backend == backend


def test_a_named_backend_that_cannot_run_here_is_refused_before_weights_are_read(monkeypatch):
    from engine.runtime import llm
    from paged_kernels import BackendUnavailableError

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(llm, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(BackendUnavailableError, match="compiles for a CUDA device"):
        llm.LLM(ModelSpec(layers=1), backend="triton", device="cpu", pool_tokens=64)


@cases("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], day=2)
@pytest.mark.parametrize("kind", ["gemma4_text", "llama"])
def test_layers_that_no_triton_kernel_serves_are_refused_before_weights_are_read(
    monkeypatch, tmp_path, kind, capability
):
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from engine.runtime.llm import LLM
    from paged_kernels import BackendUnavailableError

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    sizes = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    wide = {"head_dim": 256, "global_head_dim": 512} if kind == "gemma4_text" else {"head_dim": 512}
    AutoConfig.for_model(kind, **sizes, **wide, intermediate_size=64, vocab_size=64).save_pretrained(tmp_path)
    save_file({"no weight of it": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BackendUnavailableError, match="serves a head_dim up to 256, not 512"):
        LLM(tmp_path, backend="triton", device="cuda", pool_tokens=64)
