"""Values that no model has: errors name the file's own key and the value (P50).

Every case is a mutation of a model that loads; what a file leaves out, its family's default fills.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tellin.exceptions import LoadError, ModelLoadError
from tellin.loading.gguf import GGUFFile
from tellin.loading.model_source import open_metadata, open_model
from tests.loading.gguf_writer import write_gguf
from tests.models.encoder_files import write_encoder_gguf
from tests.models.encoders import write_encoder
from tests.models.gemma3n import write_folder, write_gguf_file
from tests.models.tiny_hybrids import write_tiny_hybrid
from tests.models.tiny_hybrids_gguf import write_tiny_hybrid_gguf


def refusal(path: Path) -> str:
    """The error of opening a model, with what an engine wants of it."""
    with pytest.raises(LoadError) as error:
        open_metadata(path)
    return str(error.value)


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
