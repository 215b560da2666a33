"""Dimensions of Mamba2 layers, and factors that Falcon-H1 multiplies into its layers.

Keys of configurations are Granite's: `tellin.loading.hybrid_hparams` renames other families'.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tellin.exceptions import ModelLoadError, UnsupportedModelError
from tellin.loading.key_names import describe
from tellin.loading.tensors import MambaHParams, ModelHParams
from tellin.loading.typed_mapping import TypedMapping

_MAX_CONV_KERNEL = 16
_MAX_STATE_DIM = 1024
_MAX_FACTOR = 1e32
_NEMOTRON: tuple[tuple[str, object], ...] = (
    ("use_bias", False),
    ("mamba_proj_bias", False),
    ("attention_bias", False),
    ("mlp_bias", False),
    ("mlp_hidden_act", "relu2"),
    ("mamba_hidden_act", "silu"),
    ("sliding_window", None),
)
_MUST_BE: dict[str, tuple[tuple[str, object], ...]] = {
    "bamba": (("mamba_proj_bias", False),),
    "falcon-h1": (
        ("mamba_proj_bias", False),
        ("projectors_bias", False),
        ("attention_bias", False),
        ("mlp_bias", False),
    ),
    "granitehybrid": (("mamba_proj_bias", False),),
    "mamba2": (("use_bias", False), ("hidden_act", "silu"), ("rms_norm", True)),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
}
"""Keys and the values whose meaning is what the plan does."""


def mamba_from_config(config: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` with what a ``config.json`` says of Mamba2 layers, renamed to Granite's keys."""
    architecture = hparams.architecture
    for key, value in _MUST_BE[architecture]:
        refuse_unless(config, key, value)
    if architecture == "granitehybrid":
        positions = config.get("position_embedding_type")
        if positions not in (None, "rope", "nope"):
            raise UnsupportedModelError(
                f"{config.path}: {positions!r:.60} positions (position_embedding_type) are not "
                "supported; supported are 'rope' and 'nope'"
            )
        # Without rope every layer leaves q and k unrotated.
        hparams = replace(hparams, no_rope_interval=None if positions == "rope" else 1)
        if "mamba" not in hparams.layer_types:
            return hparams  # the smallest models; what they say of Mamba2 means nothing
    heads = config.get_int("mamba_n_heads")
    head_dim, inner = _inner_size(config, architecture, hparams.hidden_size, heads)
    if heads * head_dim != inner:
        raise ModelLoadError(
            f"{config.path}: {describe(config, 'mamba num_heads', heads)} and "
            f"{describe(config, 'mamba head_dim', head_dim)}, which are {heads * head_dim} values; "
            f"the layers are {inner} wide ({describe(config, 'mamba inner size', inner)})"
        )
    mamba = MambaHParams(
        num_heads=heads,
        head_dim=head_dim,
        state_dim=config.get_int("mamba_d_state"),
        num_groups=config.get_int("mamba_n_groups"),
        conv_kernel=config.get_int("mamba_d_conv"),
        time_step_limit=_time_step_limit(config),
        norm_before_gate=architecture == "falcon-h1"
        and config.get_bool("mamba_norm_before_gate", True),
    )
    hparams = replace(hparams, mamba=_checked(config, mamba))
    if architecture == "falcon-h1":
        return _with_falcon_scales(config, hparams)
    return (
        replace(hparams, no_rope_interval=1) if architecture.startswith("nemotron_h") else hparams
    )


def _inner_size(
    config: TypedMapping, architecture: str, hidden_size: int, heads: int
) -> tuple[int, int]:
    """Size of a head, and the layers' width."""
    given = config.get("mamba_d_head", "auto")
    if given is None:
        given = "auto"
    if architecture.startswith("nemotron_h"):
        head_dim = config.get_int("mamba_d_head")
        return head_dim, heads * head_dim
    inner = config.get_int("mamba_expand") * hidden_size
    if architecture == "falcon-h1":
        inner = config.get_int("mamba_d_ssm", inner)
    return (inner // max(heads, 1) if given == "auto" else config.get_int("mamba_d_head")), inner


def _with_falcon_scales(config: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """Factors of the outputs of linear layers: those of an input are its readers'."""
    gate, down = _numbers(config, "mlp_multipliers", 2)
    attention_in = config.get_float("attention_in_multiplier", 1.0)
    ssm_in = config.get_float("ssm_in_multiplier", 1.0)
    parts = zip(("z", "x", "b", "c", "dt"), _numbers(config, "ssm_multipliers", 5), strict=True)
    scales = {
        "mlp.gate_proj": gate,
        "mlp.down_proj": down,
        "self_attn.q_proj": attention_in,
        "self_attn.k_proj": attention_in * config.get_float("key_multiplier", 1.0),
        "self_attn.v_proj": attention_in,
        "self_attn.o_proj": config.get_float("attention_out_multiplier", 1.0),
        "mamba.out_proj": config.get_float("ssm_out_multiplier", 1.0),
        **{f"mamba.{part}_proj": ssm_in * factor for part, factor in parts},
    }
    for name, factor in scales.items():
        if not abs(factor) <= _MAX_FACTOR:
            raise ModelLoadError(
                f"{config.path}: the factor of {name} is {factor:g} "
                f"({_multipliers(name)}), allowed are up to {_MAX_FACTOR:g}"
            )
    return replace(
        hparams,
        embedding_scale=config.get_float("embedding_multiplier", 1.0),
        logit_scale=config.get_float("lm_head_multiplier", 1.0),
        output_scales={name: factor for name, factor in scales.items() if factor != 1},
    )


def _multipliers(name: str) -> str:
    """The keys that the factor of a linear layer of Falcon-H1 is made of."""
    if name.startswith("mlp."):
        return "mlp_multipliers"
    if name in ("self_attn.o_proj", "mamba.out_proj"):
        return "attention_out_multiplier" if "attn" in name else "ssm_out_multiplier"
    if name.startswith("mamba."):
        return "ssm_in_multiplier and ssm_multipliers"
    key = " and key_multiplier" if name == "self_attn.k_proj" else ""
    return f"attention_in_multiplier{key}"


def mamba_from_metadata(metadata: TypedMapping, hparams: ModelHParams) -> ModelHParams:
    """``hparams`` with what GGUF metadata say of Mamba2 layers; factors are in the weights."""
    prefix = hparams.architecture
    heads = metadata.get_int(f"{prefix}.ssm.time_step_rank")
    inner = metadata.get_int(f"{prefix}.ssm.inner_size")
    if heads < 1 or inner % heads:
        raise ModelLoadError(
            f"{metadata.path}: {prefix}.ssm.inner_size {inner} is not a multiple of its "
            f"{heads} heads"
        )
    mamba = MambaHParams(
        num_heads=heads,
        head_dim=inner // heads,
        state_dim=metadata.get_int(f"{prefix}.ssm.state_size"),
        num_groups=metadata.get_int(f"{prefix}.ssm.group_count"),
        conv_kernel=metadata.get_int(f"{prefix}.ssm.conv_kernel"),
    )
    hparams = replace(hparams, mamba=_checked(metadata, mamba))
    if prefix == "falcon-h1":
        return hparams
    if prefix == "granitehybrid":
        if metadata.get_bool(f"{prefix}.rope.scaling.finetuned", True):
            raise UnsupportedModelError(
                f"{metadata.path}: {prefix} with rotated positions (rope.scaling.finetuned) is not "
                "supported"
            )
        shared = metadata.get_int(f"{prefix}.expert_shared_feed_forward_length", 0)
        hparams = replace(hparams, intermediate_size=shared or hparams.intermediate_size)
    return replace(hparams, no_rope_interval=1)


def checked_kernel(source: TypedMapping, kernel: int) -> int:
    """The number of rows that a convolution reaches over.

    Raises:
        ModelLoadError: none has so many, or so few.
    """
    if not 2 <= kernel <= _MAX_CONV_KERNEL:
        raise ModelLoadError(
            f"{source.path}: {describe(source, 'conv_kernel', kernel)}, allowed are 2 to "
            f"{_MAX_CONV_KERNEL}"
        )
    return kernel


def refuse_unless(config: TypedMapping, key: str, supported: object) -> None:
    """Raises `UnsupportedModelError` if the key is there, with another value."""
    value = config.get(key)
    if value is not None and value != supported:
        raise UnsupportedModelError(
            f"{config.path}: {key!r} is {value!r}, which is not supported; supported is "
            f"{supported!r}"
        )


def _checked(source: TypedMapping, mamba: MambaHParams) -> MambaHParams:
    checked_kernel(source, mamba.conv_kernel)
    for name, value, limit in (
        ("mamba num_heads", mamba.num_heads, 1 << 16),
        ("mamba head_dim", mamba.head_dim, _MAX_STATE_DIM),
        ("mamba state_dim", mamba.state_dim, _MAX_STATE_DIM),
        ("mamba num_groups", mamba.num_groups, mamba.num_heads),
    ):
        if not 1 <= value <= limit:
            raise ModelLoadError(
                f"{source.path}: {describe(source, name, value)}, allowed are 1 to {limit}"
            )
    if mamba.num_heads % mamba.num_groups:
        raise ModelLoadError(
            f"{source.path}: {describe(source, 'mamba num_groups', mamba.num_groups)}; "
            f"{mamba.num_heads} heads ({describe(source, 'mamba num_heads', mamba.num_heads)}) "
            "cannot share them evenly"
        )
    return mamba


def _time_step_limit(config: TypedMapping) -> tuple[float, float]:
    if not config.has("time_step_limit"):
        return (0.0, float("inf"))
    values: Any = config["time_step_limit"]
    try:
        low, high = (float(_unwrapped(value)) for value in values)
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    if not 0 <= low < high:
        raise ModelLoadError(
            f"{config.path}: key 'time_step_limit' is {values!r}, expected two numbers, the "
            "smaller one first"
        )
    return low, high


def _unwrapped(value: Any) -> Any:
    """Infinity is no JSON; transformers writes an object for it."""
    return value.get("__float__") if isinstance(value, dict) else value


def _numbers(config: TypedMapping, key: str, count: int) -> tuple[float, ...]:
    if not config.has(key):
        return (1.0,) * count
    values = tuple(float(value) for value in config.get_numbers(key))
    if len(values) != count or not all(map(math.isfinite, values)):
        raise ModelLoadError(f"{config.path}: key {key!r} is {values}, not {count} numbers")
    return values
