"""What `LLMEngine.add_request` returns."""

from __future__ import annotations


class RequestHandle(str):
    """Internal id of an added request, which knows the id that its outputs carry."""

    external_id: str

    def __new__(cls, internal_id: str, external_id: str) -> RequestHandle:
        handle = super().__new__(cls, internal_id)
        handle.external_id = external_id
        return handle
