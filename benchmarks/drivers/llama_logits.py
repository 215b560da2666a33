"""Logits of llama.cpp for one text, for `benchmarks.fidelity`: raw float32 rows on stdout.

Reads one JSON object from stdin: ``model`` (path), ``token_ids``, ``chunk`` (tokens per
`llama_decode`), ``num_threads``. Writes ``[len(token_ids), vocab_size]`` float32 in native byte
order, a chunk at a time, so that neither side ever holds all of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import llama_cpp
import numpy as np


def main() -> None:
    # What llama.cpp prints must not end up among the numbers.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        job["model"].encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        sys.exit(f"llama.cpp cannot load {job['model']}")
    token_ids, chunk = job["token_ids"], job["chunk"]
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = len(token_ids) + chunk
    params.n_batch = chunk
    params.n_threads = params.n_threads_batch = job["num_threads"]
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        sys.exit("llama.cpp cannot make a context")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    for start in range(0, len(token_ids), chunk):
        out.write(_logits(context, token_ids[start : start + chunk], start, vocab_size).tobytes())
        out.flush()


def _logits(context: Any, token_ids: list[int], start: int, vocab_size: int) -> np.ndarray:
    batch = llama_cpp.llama_batch_init(len(token_ids), 0, 1)
    batch.n_tokens = len(token_ids)
    for i, token_id in enumerate(token_ids):
        batch.token[i] = token_id
        batch.pos[i] = start + i
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = 0
        batch.logits[i] = 1
    if llama_cpp.llama_decode(context, batch) != 0:
        sys.exit(f"llama.cpp failed at token {start}")
    pointer = llama_cpp.llama_get_logits(context)
    logits = np.ctypeslib.as_array(pointer, (len(token_ids), vocab_size)).copy()
    llama_cpp.llama_batch_free(batch)
    return logits


if __name__ == "__main__":
    main()
