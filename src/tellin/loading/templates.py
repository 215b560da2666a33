"""Where chat templates are kept in model files. Rendering them is `chat_template`'s work."""

from __future__ import annotations

from pathlib import Path

from tellin.exceptions import ModelLoadError
from tellin.loading.json_file import is_file, read_file, read_optional_json_object
from tellin.loading.typed_mapping import TypedMapping

_MAX_TEMPLATE_BYTES = 4 << 20


def templates_from_gguf(metadata: TypedMapping) -> dict[str, str]:
    """Templates in GGUF metadata, by name; the usual one is called ``default``."""
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(f"{prefix}."): metadata.get_str(key)
        for key in metadata
        if key.startswith(f"{prefix}.")
    }
    if metadata.has(prefix):
        templates["default"] = metadata.get_str(prefix)
    return templates


def templates_from_folder(folder: Path) -> dict[str, str]:
    """Templates of a Hugging Face folder, by name; the usual one is called ``default``.

    A file ``chat_template.jinja`` wins over ``chat_template.json`` and ``tokenizer_config.json``.
    """
    templates: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        config = read_optional_json_object(folder / name)
        if config is not None and config.has("chat_template"):
            templates |= _templates(config)
    files = {"default": folder / "chat_template.jinja"}
    extra = folder / "additional_chat_templates"
    if extra.is_dir():
        files |= {path.stem: path for path in sorted(extra.glob("*.jinja"))}
    for name, path in files.items():
        if is_file(path):
            templates[name] = _read_template(path)
    return templates


def _templates(config: TypedMapping) -> dict[str, str]:
    if not isinstance(config["chat_template"], list):
        return {"default": config.get_str("chat_template")}
    templates = {}
    for entry in config["chat_template"]:
        if not isinstance(entry, dict):
            raise ModelLoadError(
                f"{config.path}: key 'chat_template' has an entry that is no object"
            )
        item = TypedMapping(config.path, entry)
        templates[item.get_str("name")] = item.get_str("template")
    return templates


def _read_template(path: Path) -> str:
    try:
        return read_file(path, _MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: is not valid UTF-8: {error.reason}") from None
