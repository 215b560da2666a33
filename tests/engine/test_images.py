"""Images in prompts, up to the core: forms, limits, placeholders, names, the cache."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tellin.config import EngineArgs, MultiModalConfig, SpeculativeConfig
from tellin.engine.image_input import MAX_PIXELS, MAX_SIDE, read_url, to_rgb
from tellin.engine.input_processor import InputProcessor
from tellin.engine.mm_config import multimodal_config
from tellin.engine.mm_processor import MultiModalProcessor
from tellin.engine.prompts import TokenizeParams
from tellin.engine.renderer import ChatParams, Renderer
from tellin.exceptions import (
    ContextLengthError,
    InvalidParameterError,
    InvalidTypeError,
    UnsupportedFeatureError,
)
from tellin.loading import load_tokenizer
from tellin.loading.images import ProcessedImage
from tellin.loading.tokenizer import Tokenizer
from tellin.sampling_params import SamplingParams
from tests.engine.fakes import make_config
from tests.models.vision import IMAGE_TOKEN_ID, write_smolvlm

MULTIMODAL = MultiModalConfig({"image": 3}, max_tokens_per_item=16, encoder_cache_size=32)


class FakeProcessor:
    """A picture of width w makes w rows, two marks around them and one in their middle."""

    placeholder = row_placeholder = "<image>"
    placeholder_token_id = user_token_id = IMAGE_TOKEN_ID
    rows_see_each_other = False
    tokens_per_tile = max_tokens_per_image = 16
    pixel_table = np.zeros((3, 256), np.float32)

    def __init__(self) -> None:
        self.processed: list[tuple[str, tuple[int, int]]] = []

    def process(self, image: Image.Image) -> ProcessedImage:
        self.processed.append((image.mode, image.size))
        width = image.width
        pixels = np.asarray(image).reshape(1, -1, 3).copy()
        text = f"[{'<image>' * (width // 2)}|{'<image>' * (width - width // 2)}]"
        return ProcessedImage(pixels, self.pixel_table, text, width)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_smolvlm(tmp_path_factory.mktemp("model")))


@pytest.fixture
def processor() -> FakeProcessor:
    return FakeProcessor()


@pytest.fixture
def renderer(tokenizer: Tokenizer, processor: FakeProcessor) -> Renderer:
    return make_renderer(tokenizer, processor)


def make_renderer(
    tokenizer: Tokenizer, processor: FakeProcessor, template: str | None = None, **fields: Any
) -> Renderer:
    config = MultiModalConfig(**{**MULTIMODAL.__dict__, **fields})
    chosen = {} if template is None else {"chat_template": template}
    made = make_config(tokenizer, multimodal_config=config, max_model_len=128, **chosen)
    return Renderer(made, tokenizer, MultiModalProcessor(config, processor, "m"))  # type: ignore[arg-type]


def picture(width: int = 4, height: int = 2, color: Any = (200, 10, 10)) -> Image.Image:
    return Image.new("RGB", (width, height), color)


def png(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def render(renderer: Renderer, prompt: Any, **options: Any) -> Any:
    return renderer.render_cmpl([prompt], TokenizeParams(**options))[0]


def with_images(text: Any, *images: Any, **extra: Any) -> dict[str, Any]:
    key = "prompt" if isinstance(text, str) else "prompt_token_ids"
    return {key: text, "multi_modal_data": {"image": list(images)}, **extra}


# ---------------------------------------------------------------------- forms of a picture


def test_all_forms_of_a_picture_are_the_same_picture() -> None:
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
    array = np.asarray(image)
    for given in (image, array, array.transpose(2, 0, 1), png(image), memoryview(png(image))):
        assert to_rgb(given).tobytes() == image.tobytes()
        assert to_rgb(given).mode == "RGB"


def test_transparency_becomes_white_and_a_file_is_turned_upright() -> None:
    clear = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    assert to_rgb(clear).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (2, 1), 0)
    assert to_rgb(png(palette, transparency=0)).getpixel((0, 0)) == (255, 255, 255)
    assert to_rgb(Image.new("L", (2, 1), 7)).getpixel((1, 0)) == (7, 7, 7)
    lying = picture(4, 2)
    exif = lying.getexif()
    exif[0x0112] = 6  # turn it by a quarter
    assert to_rgb(png(lying, exif=exif)).size == (2, 4)


def test_transparency_in_several_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(0)
    rgba = Image.fromarray(random.randint(0, 256, (7, 5, 4), np.uint8))
    palette = rgba.convert("RGB").quantize(16)
    palette.info["transparency"] = 3
    for image in (rgba, palette, rgba.convert("LA")):
        whole = to_rgb(image)
        monkeypatch.setattr("tellin.engine.image_input._PIXELS_AT_ONCE", 11)
        assert to_rgb(image).tobytes() == whole.tobytes()
        monkeypatch.undo()


def test_of_sixteen_bits_the_upper_eight_count() -> None:
    """Not cut off at 255, so that nearly all were white."""
    gray = Image.fromarray(np.array([[0, 255, 256, 0x80FF, 0xFFFF]], np.uint16))
    values = [0, 0, 1, 0x80, 0xFF]
    buffer = io.BytesIO()
    gray.save(buffer, "TIFF")
    for given in (gray, png(gray), buffer.getvalue()):
        assert [to_rgb(given).getpixel((i, 0)) for i in range(5)] == [(v, v, v) for v in values]
    assert to_rgb(Image.new("I", (2, 1), 255)).getpixel((0, 0)) == (255, 255, 255)
    for image, message in (
        (Image.new("I", (2, 1), 256), "256 to 256, not bytes"),
        (Image.new("F", (2, 1), 0.5), "floats"),
    ):
        with pytest.raises(InvalidParameterError, match=f"{message}.*mode L or RGB"):
            to_rgb(image)


def test_of_an_animation_the_first_frame_counts() -> None:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    assert to_rgb(buffer.getvalue()).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(kind: str) -> None:
    buffer = io.BytesIO()
    picture(8, 8, (255, 255, 255)).save(buffer, kind)
    assert to_rgb(buffer.getvalue()).getpixel((3, 3)) == (255, 255, 255)


def test_p_what_is_no_picture_is_refused_in_words() -> None:
    whole = png(picture(64, 64, (1, 2, 3)))
    huge = png(Image.new("1", (MAX_PIXELS // 4096 + 1, 4096)))
    for given, message in (
        (b"", "empty"),
        (b"GIF89a", "no picture that can be read"),
        (b"<svg/>", "no picture that can be read"),
        (whole[: len(whole) // 2], "broken"),
        (huge, "more than the"),
    ):
        with pytest.raises(InvalidParameterError, match=f"image 7.*{message}"):
            to_rgb(given, "image 7")
    for given in (5, object(), np.zeros((2, 2, 3)), np.zeros((2, 2), np.uint8)):
        with pytest.raises(InvalidTypeError, match="uint8 array"):
            to_rgb(given)
    for side in (MAX_SIDE + 1, MAX_PIXELS):
        with pytest.raises(InvalidParameterError, match=f"1 x {side} pixels.*no side.*{MAX_SIDE}"):
            to_rgb(np.zeros((side, 1, 3), np.uint8))
    with pytest.raises(InvalidParameterError, match="no pixels"):
        to_rgb(np.zeros((0, 4, 3), np.uint8))


def test_urls(tmp_path: Path) -> None:
    """A good guest touches no network, and no file that is not allowed."""
    image = png(picture())
    url = data_url(picture())
    assert read_url(url, "x") == image
    assert read_url(url.replace("image/png", "IMAGE/PNG;name=a"), "x") == image
    assert read_url("data:image/png;base64," + base64.encodebytes(image).decode(), "x") == image
    assert read_url("data:,a%20b", "x") == b"a b"
    for bad in ("data:image/png;base64,%%%", "data:image/png;base64", "data:image/png;base64,a"):
        with pytest.raises(InvalidParameterError, match=r"data: URL|base64"):
            read_url(bad, "x")
    for bad in ("https://example.com/a.png", "HTTP://x", "ftp://x", "/etc/passwd", "a.png", ""):
        with pytest.raises(UnsupportedFeatureError, match="nothing is fetched"):
            read_url(bad, "x")
    with pytest.raises(InvalidTypeError):
        read_url(5, "x")
    folder = tmp_path / "media"
    folder.mkdir()
    (folder / "a b.png").write_bytes(image)
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    inside = (folder / "a b.png").as_uri()
    assert read_url(inside, "x", folder) == image
    with pytest.raises(UnsupportedFeatureError, match="allowed_local_media_path"):
        read_url(inside, "x")
    for bad in (
        (tmp_path / "secret").as_uri(),
        f"file://{folder}/../secret",
        f"file://{folder}/link",
        f"file://host{folder}/a%20b.png",
        f"file://{folder}/none",
        f"file://{folder}",
        "file:///%00",
    ):
        with pytest.raises(InvalidParameterError, match=r"outside|cannot be read"):
            read_url(bad, "x", folder)


# ---------------------------------------------------------------------- prompts


def test_s20_inp55_a_placeholder_becomes_rows_with_their_places(renderer: Renderer) -> None:
    prompt = with_images("a<image>b<image>", picture(4), picture(3))
    rendered = render(renderer, prompt)
    text = "a[<image><image>|<image><image>]b[<image>|<image><image>]"
    assert rendered["prompt_token_ids"] == renderer.get_tokenizer().encode(text)
    assert rendered["type"] == "multimodal"
    items = rendered["mm_items"]["image"]
    assert items["placeholders"] == [(2, 5), (10, 4)]
    assert items["embed_runs"] == [[(0, 2), (3, 2)], [(0, 1), (2, 2)]]
    assert len(set(items["hashes"])) == 2
    assert [data.shape for data in items["data"]] == [(1, 8, 3), (1, 6, 3)]
    features = InputProcessor(renderer.config, renderer).process_inputs(
        "r", rendered, SamplingParams(), ("generate",)
    ).mm_features  # fmt: skip
    assert features is not None
    assert [(f.offset, f.length, f.num_embeds) for f in features] == [(2, 5, 4), (10, 4, 3)]
    ids = rendered["prompt_token_ids"]
    for feature in features:
        for position, _, count in feature.embeds_in(0, 99):
            assert ids[position : position + count] == [IMAGE_TOKEN_ID] * count


def test_token_ids_are_expanded_likewise(renderer: Renderer) -> None:
    tokenizer = renderer.get_tokenizer()
    image = picture(5)
    text = render(renderer, with_images("a<image>b", image))
    ids = render(renderer, with_images(tokenizer.encode("a<image>b"), image))
    assert ids["prompt_token_ids"] == text["prompt_token_ids"]
    assert ids["mm_items"]["image"]["placeholders"] == text["mm_items"]["image"]["placeholders"]
    again = render(renderer, with_images(ids["prompt_token_ids"], image))
    assert again["prompt_token_ids"] == ids["prompt_token_ids"], "8.4.4: expanded already"
    expanded = with_images("a[<image><image>|<image><image><image>]b", image)
    assert render(renderer, expanded)["prompt_token_ids"] == ids["prompt_token_ids"]


@pytest.mark.parametrize("text", ["none", "<image>", "<image><image><image><image><image>"])
def test_8_4_4_other_numbers_of_placeholders_name_both_counts(
    renderer: Renderer, text: str
) -> None:
    count = text.count("<image>")
    for prompt in (text, renderer.get_tokenizer().encode(text)):
        with pytest.raises(InvalidParameterError, match=rf"has {count} placeholders.*2 images"):
            render(renderer, with_images(prompt, picture(4), picture(2)))


def test_8_1_3_too_many_images(renderer: Renderer, processor: FakeProcessor) -> None:
    with pytest.raises(InvalidParameterError, match=r"has 4 images.*at most 3"):
        render(renderer, with_images("<image>" * 4, *[picture()] * 4))
    assert not processor.processed, "judged before any work"


def test_images_beyond_the_context_are_not_even_decoded(
    tokenizer: Tokenizer, processor: FakeProcessor
) -> None:
    made = make_renderer(tokenizer, processor, limit_per_prompt={"image": 99})
    images = [picture(60, 1, (i, 0, 0)) for i in range(9)]
    with pytest.raises(ContextLengthError, match=r"first 3 of 9 images take 180 tokens.*128"):
        render(made, with_images("<image>" * 9, *images))
    assert len(processor.processed) == 3


def test_a_prompt_with_images_is_not_truncated(renderer: Renderer) -> None:
    prompt = with_images("abc<image>", picture(4))
    assert render(renderer, prompt, truncate_prompt_tokens=50)["num_truncated_tokens"] == 0
    with pytest.raises(ContextLengthError, match="cannot be truncated to 5"):
        render(renderer, prompt, truncate_prompt_tokens=5)


def test_inp12_an_item_larger_than_the_encoder_cache(renderer: Renderer) -> None:
    rendered = render(renderer, with_images("<image>", picture(40, 1)))
    gate = InputProcessor(renderer.config, renderer)
    with pytest.raises(ContextLengthError, match=r"'image' takes 40 embeddings.*holds 32"):
        gate.process_inputs("r", rendered, SamplingParams(), ("generate",))


def test_a_text_may_speak_of_the_placeholder(renderer: Renderer) -> None:
    assert render(renderer, "what is <image>?")["type"] == "token"


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"multi_modal_data": {"video": b"x"}}, UnsupportedFeatureError),
        ({"multi_modal_data": [picture()]}, InvalidTypeError),
        ({"multi_modal_data": {"image": [None]}}, InvalidParameterError),
        ({"multi_modal_data": {"image": picture()}, "multi_modal_uuids": {"image": []}},
         InvalidParameterError),
        ({"multi_modal_data": {"image": picture()}, "multi_modal_uuids": {"image": 5}},
         InvalidTypeError),
        ({"multi_modal_data": {"image": picture()}, "mm_processor_kwargs": {"size": 5}},
         UnsupportedFeatureError),
    ],
)  # fmt: skip
def test_malformed_data(renderer: Renderer, extra: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        render(renderer, {"prompt": "<image>", **extra})


# ---------------------------------------------------------------------- names and the cache


def key_of(renderer: Renderer, prompt: Any, **extras: Any) -> str:
    rendered = renderer.render_cmpl([prompt], prompt_extras=extras or None)[0]
    return rendered["mm_items"]["image"]["hashes"][0]


def test_inp56_the_same_pixels_have_the_same_name_and_are_processed_once(
    renderer: Renderer, processor: FakeProcessor
) -> None:
    image = picture()
    forms = (image, np.asarray(image), png(image), data_url(image), png(image, compress_level=0))
    keys = {key_of(renderer, with_images("<image>", form)) for form in forms}
    assert len(keys) == 1
    assert processor.processed == [("RGB", (4, 2))]
    stats = renderer.stat_mm_cache()
    assert stats is not None
    assert (stats.queries, stats.hits) == (5, 4)
    assert renderer.stat_mm_cache().queries == 0  # type: ignore[union-attr]
    other_shape = picture(2, 4)
    assert key_of(renderer, with_images("<image>", other_shape)) not in keys
    assert key_of(renderer, with_images("<image>", picture(color=(0, 0, 1)))) not in keys


def test_a_known_file_is_not_decoded_again(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = with_images("<image>", png(picture()))
    first = render(renderer, prompt)
    monkeypatch.setattr("tellin.engine.mm_processor.to_rgb", None)
    assert (
        render(renderer, prompt)["mm_items"]["image"]["hashes"]
        == (first["mm_items"]["image"]["hashes"])
    )


def test_8_2_3_a_name_stands_for_what_was_sent_under_it(renderer: Renderer) -> None:
    uuids = {"image": "cat"}
    with pytest.raises(InvalidParameterError, match=r"'cat' and no data.*send it"):
        render(renderer, {"prompt": "<image>", "multi_modal_uuids": uuids})
    named = with_images("<image>", picture(4), multi_modal_uuids=uuids)
    key = key_of(renderer, named)
    assert key_of(renderer, {"prompt": "<image>", "multi_modal_uuids": uuids}) == key
    assert key_of(renderer, with_images("<image>", None, multi_modal_uuids=uuids)) == key
    other = with_images("<image>", picture(8), multi_modal_uuids=uuids)
    assert key_of(renderer, other) == key, "what was sent first counts"


def test_a_name_never_stands_for_two_pictures(
    tokenizer: Tokenizer, processor: FakeProcessor, renderer: Renderer
) -> None:
    """What a core keeps under a key are the rows of one picture: a key is that of the content."""
    keeps_nothing = make_renderer(tokenizer, processor, processor_cache_gb=0)
    for made, forget in ((keeps_nothing, lambda: None), (renderer, renderer.clear_mm_cache)):
        keys = set()
        for size in (4, 8, 4):
            named = with_images("<image>", picture(size), multi_modal_uuids={"image": "cat"})
            keys.add(key_of(made, named))
            assert key_of(made, with_images("<image>", picture(size))) in keys
            forget()
        assert len(keys) == 2


def test_8_2_3_wart_names_of_tenants_are_apart(renderer: Renderer) -> None:
    named = with_images("<image>", picture(4), multi_modal_uuids={"image": "cat"})
    key = key_of(renderer, {**named, "cache_salt": "a"})
    assert key_of(renderer, named, cache_salt="a") == key
    with pytest.raises(InvalidParameterError, match="no such image is cached"):
        key_of(renderer, {"prompt": "<image>", "multi_modal_uuids": {"image": "cat"}})


def test_8_3_1_the_cache_is_bounded_by_bytes(
    tokenizer: Tokenizer, processor: FakeProcessor
) -> None:
    size = np.prod((4, 2, 3))  # bytes of a processed picture
    made = make_renderer(tokenizer, processor, processor_cache_gb=2 * size / (1 << 30))
    for color in (1, 2, 1, 3, 1, 2):
        key_of(made, with_images("<image>", picture(color=(color, 0, 0))))
    assert len(processor.processed) == 4, "the longest unused left: 2, not 1"
    key_of(made, with_images("<image>", picture(16, 2)))
    key_of(made, with_images("<image>", picture(16, 2)))
    assert len(processor.processed) == 6, "what alone is larger is passed on"


def test_a_cleared_cache_processes_anew(renderer: Renderer, processor: FakeProcessor) -> None:
    prompt = with_images("<image>", png(picture()))
    render(renderer, prompt)
    renderer.clear_mm_cache()
    render(renderer, prompt)
    assert len(processor.processed) == 2


# ---------------------------------------------------------------------- conversations

STRINGS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
)


def chat(renderer: Renderer, *contents: Any, **params: Any) -> Any:
    messages = [{"role": "user", "content": content} for content in contents]
    return renderer.render_chat([messages], ChatParams(**params))[1][0]


def test_templates_get_the_contents_they_read(
    tokenizer: Tokenizer, processor: FakeProcessor
) -> None:
    parts = [
        {"type": "text", "text": "one"},
        {"type": "image_url", "image_url": {"url": data_url(picture(4))}},
        {"type": "text", "text": "two"},
    ]
    made = make_renderer(tokenizer, processor, PARTS)
    assert chat(made, "hi", parts)["prompt"] == "user:hi\nuser:one<image>two\n"
    assert chat(made, "hi")["prompt"] == "user:hi\n", "also without a picture"
    made = make_renderer(tokenizer, processor, STRINGS)
    rendered = chat(made, "hi", parts)
    assert rendered["prompt"] == "user: hi\nuser: <image>\none\ntwo\n"
    assert len(rendered["mm_items"]["image"]["data"]) == 1
    parts[0]["text"] = "see <image>"
    assert chat(made, parts)["prompt"] == "user: see <image>\ntwo\n", "the text says where"
    assert chat(made, parts[1:2])["prompt"] == "user: <image>\n"


def test_a_template_of_the_requests_own_is_tried_too(
    tokenizer: Tokenizer, processor: FakeProcessor
) -> None:
    made = make_renderer(tokenizer, processor, STRINGS)
    assert chat(made, "hi", chat_template=PARTS)["prompt"] == "user:hi\n"
    assert chat(made, "hi", chat_template=STRINGS)["prompt"] == "user: hi\n"
    with_parts = chat(made, "hi", chat_template=STRINGS, content_format="openai")
    assert "'type': 'text'" in with_parts["prompt"]


def test_a_text_model_whose_template_reads_parts_only_gets_them(tokenizer: Tokenizer) -> None:
    made = Renderer(make_config(tokenizer, max_model_len=128, chat_template=PARTS), tokenizer)  # type: ignore[arg-type]
    assert chat(made, "hi")["prompt"] == "user:hi\n"
    with pytest.raises(UnsupportedFeatureError, match="no image encoder"):
        chat(made, [{"type": "image_pil", "image_pil": picture()}])


def test_forms_of_image_parts(renderer: Renderer) -> None:
    url = data_url(picture(4))
    image = picture(4)
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": image},
        {"type": "image", "image": png(image)},
        {"type": "image", "image": url, "uuid": "name"},
        {"type": "image_pil", "uuid": "name"},
    ):
        assert len(chat(renderer, [part])["mm_items"]["image"]["data"]) == 1, part
    for bad in (
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": None}},
        {"type": "image", "image": None},
        {"type": "image", "image": image, "uuid": ""},
    ):
        with pytest.raises(InvalidTypeError):
            chat(renderer, [bad])
    for other in ({"type": "video_url"}, {"type": "input_image", "file_id": "f"}):
        with pytest.raises(UnsupportedFeatureError):
            chat(renderer, [other])


def test_images_are_rendered_beside_the_event_loop(
    renderer: Renderer, processor: FakeProcessor
) -> None:
    threads = []
    original = processor.process

    def process(image: Image.Image) -> ProcessedImage:
        threads.append(threading.current_thread().name)
        return original(image)

    processor.process = process  # type: ignore[method-assign]
    part = {"type": "image_pil", "image_pil": picture(5)}
    messages = [{"role": "user", "content": [part]}]

    async def main() -> None:
        rendered = await renderer.render_cmpl_async([with_images("<image>", picture())])
        assert rendered[0]["type"] == "multimodal"
        await renderer.render_chat_async([messages])
        gate = InputProcessor(renderer.config, renderer)
        await gate.render_async(with_images("<image>", picture(6)))

    asyncio.run(main())
    assert threads == ["tellin-images_0"] * 3
    renderer.shutdown()
    renderer.shutdown()


def test_without_pillow_the_extra_is_named(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UnsupportedFeatureError, match=r"tellin\[images\]"):
        render(renderer, with_images("<image>", b"x"))


# ---------------------------------------------------------------------- arguments


def resolve(path: Path, **args: Any) -> MultiModalConfig | None:
    made = make_config(path=path)
    speculation = args.pop("speculation", None)
    engine_args = EngineArgs(model="m", **args)
    return multimodal_config(
        engine_args, made.model_config, made.scheduler_config, speculation
    )  # fmt: skip


def test_arguments(tmp_path: Path) -> None:
    path = write_smolvlm(tmp_path / "model")
    config = resolve(path)
    assert config is not None
    assert config.limit_per_prompt == {"image": 999}
    assert config.max_tokens_per_item == 68
    assert config.encoder_cache_size == 2048
    config = resolve(path, limit_mm_per_prompt={"image": {"count": 2}, "video": 0})
    assert config is not None
    assert config.limit_per_prompt == {"image": 2}
    assert resolve(path, limit_mm_per_prompt={"image": 0}) is None
    config = resolve(path, allowed_local_media_path=str(tmp_path), mm_processor_cache_gb=0)
    assert config is not None
    assert config.allowed_local_media_path == tmp_path.resolve()
    assert config.processor_cache_gb == 0


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"limit_mm_per_prompt": 5}, InvalidTypeError),
        ({"limit_mm_per_prompt": {"image": -1}}, InvalidParameterError),
        ({"limit_mm_per_prompt": {"image": "x"}}, InvalidTypeError),
        ({"limit_mm_per_prompt": {"video": 1}}, UnsupportedFeatureError),
        ({"mm_processor_cache_gb": -1}, InvalidParameterError),
        ({"allowed_local_media_path": "/no/such/folder"}, InvalidParameterError),
        ({"mmproj": "/no/such/file"}, InvalidParameterError),
        ({"speculation": SpeculativeConfig("draft_model", 2, "x")}, UnsupportedFeatureError),
    ],
)
def test_arguments_that_cannot_be_followed(
    tmp_path: Path, args: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        resolve(write_smolvlm(tmp_path / "model"), **args)
