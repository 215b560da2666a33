"""Several LoRA adapters and the base model, all in one batch.

python examples/lora.py [MODEL] [ADAPTER ...]

An ADAPTER is a folder as the PEFT library saves it. Without one, two of random numbers are made
here: they show what is in such a folder, and make the model babble in two ways.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tellin import LLM, LoRARequest, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
folders = [Path(name) for name in sys.argv[2:]]


def make_adapter(folder: Path, hidden_size: int, num_layers: int, seed: int) -> Path:
    """An adapter of rank 4 that changes every output projection of attention."""
    rank, random = 4, np.random.default_rng(seed)
    tensors = {}
    for i in range(num_layers):
        name = f"base_model.model.model.layers.{i}.self_attn.o_proj"
        a = random.normal(0, hidden_size**-0.5, (rank, hidden_size))
        b = random.normal(0, 0.3, (hidden_size, rank))
        tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


with (
    tempfile.TemporaryDirectory() as scratch,
    LLM(model, max_model_len=256, download=True, enable_lora=True, max_loras=4) as llm,
):
    if not folders:
        sizes = llm.model_config.hidden_size, llm.model_config.num_hidden_layers
        folders = [make_adapter(Path(scratch, name), *sizes, i) for i, name in enumerate("ab")]
    # A name and a number of your own for each; None is the base model.
    adapters = [LoRARequest(f.name, i, str(f)) for i, f in enumerate(folders, 1)]
    loras = [None, *adapters]
    prompt = "The best thing about the sea is"
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate([prompt] * len(loras), params, lora_request=loras)
    for lora, output in zip(loras, outputs, strict=True):
        print(f"{lora.lora_name if lora else 'base model':12} {output.outputs[0].text!r}")
