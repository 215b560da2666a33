"""What a token of a benchmark's model costs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.models import open_bench_model
from benchmarks.synthetic import SIZES, write_llama
from tellin.loading import open_model


def test_a_token_of_a_mixture_costs_its_own_experts_alone(tmp_path: Path) -> None:
    shape = SIZES["tiny-moe"]
    path = write_llama(tmp_path / "moe.gguf", shape, "q8_0")
    model = open_bench_model(str(path), tmp_path)
    with open_model(path) as source:
        sizes = {name: tensor.data.nbytes for name, tensor in source.tensors.items()}
        macs = {
            name: tensor.num_elements
            for name, tensor in source.tensors.items()
            if name.startswith("layers.") and len(tensor.shape) == 2
        }
    experts = [name for name in sizes if ".experts." in name]
    assert len(experts) == 3 * shape.num_experts * shape.num_hidden_layers
    unused = 1 - shape.num_experts_per_tok / shape.num_experts
    cost = sum(sizes.values()) - unused * sum(sizes[name] for name in experts)
    assert model.weight_bytes_per_token == cost
    assert model.macs_per_prefill_token == sum(macs.values()) - unused * sum(
        macs[name] for name in experts
    )
