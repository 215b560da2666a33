"""Values that no model has: errors name the file's own key and the value (P50).

Every case is a mutation of a model that loads; what a file leaves out, its family's default fills.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import LoadError
from tellin.loading.gguf import GGUFFile, StringArray
from tellin.loading.model_source import open_metadata, open_model
from tellin.models import build_plan
from tests.loading.gguf_writer import RawTensor, Typed, write_gguf
from tests.models.encoder_files import write_encoder_gguf
from tests.models.encoders import write_encoder
from tests.models.gemma3n import write_gguf_file
from tests.models.tiny_hybrids import write_tiny_hybrid


def changed(folder: Path, name: str = "config.json", **keys: Any) -> Path:
    """The folder, with keys of one of its JSON files changed."""
    file = folder / name
    values = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(values | keys))
    return folder


@pytest.mark.parametrize(
    ("family", "key", "value", "words"),
    [
        ("nemotron_h", "layer_norm_epsilon", "x", r"key 'layer_norm_epsilon' is a str, .*'x'"),
        ("nemotron_h", "mamba_num_heads", -1, "mamba_num_heads is -1"),
        ("nemotron_h", "mamba_num_heads", 1.5, "key 'mamba_num_heads' is a float, .*1.5"),
        ("nemotron_h", "ssm_state_size", [[1]], r"key 'ssm_state_size' is an array, .*\[\[1\]\]"),
        ("nemotron_h", "conv_kernel", 99, "conv_kernel is 99"),
        ("nemotron_h", "n_groups", 0, "n_groups is 0"),
        ("lfm2", "norm_eps", -1.0, "norm_eps is -1.0"),
        ("lfm2", "layer_types", ["conv", "x", "conv", "conv"], r"type 'x'.*\(layer_types\)"),
        ("granitehybrid", "shared_intermediate_size", 0, "shared_intermediate_size is 0"),
        ("granitehybrid", "residual_multiplier", 0, "residual_multiplier is 0"),
        ("granitehybrid", "logits_scaling", 0, "logits_scaling is 0, which makes logit_scale inf"),
        ("falcon-h1", "mamba_d_ssm", 7, "mamba_d_ssm is 7"),
        ("falcon-h1", "key_multiplier", 1e300, "attention_in_multiplier and key_multiplier"),
        ("falcon-h1", "num_key_value_heads", 3, "num_key_value_heads is 3"),
        ("bamba", "partial_rotary_factor", -1, "partial_rotary_factor is -1, which makes rope_dim"),
    ],
)
def test_names_are_those_of_the_configuration(
    tmp_path: Path, family: str, key: str, value: Any, words: str
) -> None:
    folder = changed(write_tiny_hybrid(tmp_path, family), **{key: value})
    with pytest.raises(LoadError, match=rf"config\.json: .*{words}"):
        open_metadata(folder)


def changed_gguf(path: Path, **keys: Any) -> Path:
    """The file with entries of its metadata changed; ``__`` in a name stands for a dot."""
    file = GGUFFile(path)
    values = {key: list(v) if isinstance(v, StringArray) else v for key, v in file.metadata.items()}
    values |= {key.replace("__", "."): value for key, value in keys.items()}
    tensors = {
        name: RawTensor(tensor.shape, int(tensor.quant_type), tensor.data.tobytes())
        for name, tensor in file.tensors.items()
    }
    file.close()
    return write_gguf(path.with_name("changed.gguf"), values, tensors)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention__sliding_window_pattern", "x", "is a str, .*'x'"),
        (
            "attention__sliding_window_pattern",
            [[1], [0]],
            r"is an array, expected an array of numbers",
        ),
        ("attention__sliding_window_pattern", np.array([1, 0]), "has 2 entries, expected 7"),
        ("attention__sliding_window_pattern", np.full(7, 1 << 62), "holds 4611686018427387904 for"),
        ("feed_forward_length", np.array([-1, 2]), r"\[-1, 2\], which makes intermediate_size -1"),
        ("attention__layer_norm_rms_epsilon", Typed(12, math.nan), "is nan, not a finite number"),
        ("attention__shared_kv_layers", Typed(5, -1), r"-1 of 7 layers share .*shared_kv_layers"),
        ("activation_sparsity_scale", np.array([1.0, 2.0]), "there are 2 .*sparsity_scale"),
        ("altup__active_idx", 3, "altup.active_idx is 3"),
        ("altup__num_inputs", 1 << 40, "altup.num_inputs is 1099511627776"),
        ("embedding_length", 0, "embedding_length is 0"),
    ],
)
def test_names_are_those_of_gemma3n_metadata(
    tmp_path: Path, key: str, value: Any, words: str
) -> None:
    path = changed_gguf(write_gguf_file(tmp_path / "m.gguf"), **{f"gemma3n__{key}": value})
    with pytest.raises(LoadError, match=rf"changed\.gguf: .*{words}") as error:
        open_metadata(path)
    assert key.rpartition("__")[2] in str(error.value)


@pytest.mark.parametrize(
    ("case", "key", "value", "words"),
    [
        ("gemma", "attention__sliding_window_pattern", np.array([1]), "has 1 entries, expected 3"),
        ("gemma", "attention__sliding_window_pattern", Typed(5, -3), "is -3, allowed are 1 to"),
        ("gemma", "attention__head_count_kv", np.full(3, 1 << 62), "head_count_kv is "),
        ("modernbert", "attention__sliding_window_pattern", np.array([], np.int32), "0 entries"),
        ("modernbert", "embedding_length", 3, "head_dim is 0 .*embedding_length is 3 and"),
        ("nomic", "attention__head_count", 0, "has 0 .*head_count"),
        ("nomic", "attention__layer_norm_epsilon", "x", "is a str, .*'x'"),
    ],
)
def test_names_are_those_of_an_encoders_metadata(
    tmp_path: Path, case: str, key: str, value: Any, words: str
) -> None:
    path = write_encoder_gguf(tmp_path / "m.gguf", case)
    with open_model(path) as source:
        name = f"{source.hparams.architecture}__{key}"
    with pytest.raises(LoadError, match=rf"changed\.gguf: .*{words}"):
        open_metadata(changed_gguf(path, **{name: value}))


def test_kinds_of_tokens_that_are_none(tmp_path: Path) -> None:
    types = np.ones(64, np.int32)
    types[5] = 99
    path = changed_gguf(write_gguf_file(tmp_path / "m.gguf"), tokenizer__ggml__token_type=types)
    with pytest.raises(LoadError, match=r"tokenizer\.ggml\.token_type holds 99, allowed are 0"):
        open_metadata(path)


def read_all(folder: Path) -> None:
    with open_model(folder) as source:
        assert source.metadata.tokenizer_size > 0
        source.load_tokenizer()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"added_tokens": [{"id": 1 << 31, "content": "<x>"}]}, "a token with id 2147483648"),
        ({"model": {"dropout": 0.5}}, "'dropout' is 0.5: token ids would be random"),
        ({"model": {"vocab": {"a": "x"}}}, "Expected `int`, got `str`"),
        ({"normalizer": [1]}, "is not a usable tokenizer file"),
    ],
)
def test_tokenizers_that_cannot_be_meant(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = write_tiny_hybrid(tmp_path, "lfm2")
    values = json.loads((folder / "tokenizer.json").read_text())
    for key, value in change.items():
        if key == "added_tokens":
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            value[0] |= dict.fromkeys(flags, False)
        values[key] = values[key] | value if isinstance(value, dict) else value
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(LoadError, match=rf"tokenizer\.json: .*{words}"):
        read_all(folder)


def test_added_tokens_without_an_id(tmp_path: Path) -> None:
    folder = write_tiny_hybrid(tmp_path, "lfm2")
    changed(folder, "tokenizer_config.json", added_tokens_decoder={"a": {"content": "x"}})
    with open_model(folder) as source, pytest.raises(LoadError, match="'a', no token id"):
        source.load_tokenizer()


NAMES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["folder", "loop", "nowhere", "pipe", "endless", "empty"])
def test_what_lies_in_a_files_place(tmp_path: Path, name: str, kind: str) -> None:
    """An incomplete download leaves links to nothing: they must not count as left out."""
    folder = write_tiny_hybrid(tmp_path, "lfm2")
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "empty":
        file.touch()
    else:
        target = {"loop": file, "nowhere": folder / "blob", "endless": Path("/dev/zero")}
        file.symlink_to(target[kind])
    if (name, kind) == ("chat_template.jinja", "empty"):
        return  # a template that writes nothing
    with pytest.raises(LoadError, match=re.escape(str(file))):
        open_metadata(folder)


@pytest.mark.parametrize("shard", ["a" * 5000, "a\0b", "../model.safetensors", ""])
def test_shards_with_impossible_names(tmp_path: Path, shard: str) -> None:
    folder = write_tiny_hybrid(tmp_path, "lfm2")
    (folder / "model.safetensors").unlink()
    changed(folder, "model.safetensors.index.json", weight_map={"x": shard})
    with pytest.raises(LoadError, match=str(folder)):
        open_model(folder)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            {"type": "x.Pooling", "path": "../elsewhere"},
            "'path' is '../elsewhere', which",
        ),
        ({"type": "x.Pooling", "path": "/etc"}, "'path' is '/etc', which is not in"),
        ({"type": "x.Pooling", "path": 5}, "key 'path' is 5, expected a string"),
        ({"type": [[1]], "path": ""}, r"key 'type' is \[\[1\]\], expected a string"),
        ({"type": "x.Mixer", "path": ""}, r"module 'Mixer' \(key 'type'\) is not supported"),
    ],
)
def test_modules_of_another_place_or_kind(
    tmp_path: Path, entry: dict[str, Any], words: str
) -> None:
    folder = write_encoder(tmp_path, "modernbert")
    assert open_metadata(folder).pooler is not None
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, entry]))
    with pytest.raises(LoadError, match=rf"modules\.json: .*{words}"):
        open_metadata(folder)


def test_a_scale_of_attention_that_is_none(tmp_path: Path) -> None:
    folder = changed(write_encoder(tmp_path, "gemma"), query_pre_attn_scalar=-1)
    with pytest.raises(LoadError, match=r"config\.json: query_pre_attn_scalar is -1\.0, expected"):
        open_metadata(folder)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"beta_fast": -1}, "rope beta is -1.0; it must be between"),
        ({"original_max_position_embeddings": 0}, "needs original_max_position_embeddings; got 0"),
    ],
)
def test_errors_of_a_plan_name_the_model(
    tmp_path: Path, scaling: dict[str, Any], words: str
) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    folder = changed(write_tiny_hybrid(tmp_path, "lfm2"), rope_scaling=yarn | scaling)
    with (
        open_model(folder) as source,
        pytest.raises(LoadError, match=rf"{re.escape(str(folder))}: .*{words}"),
    ):
        build_plan(source)


def test_a_context_that_scaling_would_hide(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    folder = changed(
        write_tiny_hybrid(tmp_path, "lfm2"), rope_scaling=yarn, max_position_embeddings=-1
    )
    with pytest.raises(LoadError, match=r"config\.json: max_position_embeddings is -1, allowed"):
        open_metadata(folder)
