// Pictures that go with the next message: chosen, pasted or dropped, shown small, and taken out again.
// Nothing here without a model that sees them.

import { byId, dress, h, icon } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/tiff"];
const MAX_BYTES = 20 * 2 ** 20; // a request may have 32 MiB, and base64 makes a third more of it

/** Owns the pictures of the composer, each `{ name, url }` with a data: URL. */
export class Pictures {
  constructor(announce, onResize) {
    this.announce = announce;
    this.onResize = onResize;
    this.isOn = false;
    this.chosen = [];
    this.list = byId("attached");
    this.button = byId("attach");
    this.input = byId("picture-input");
    dress(this.button, "picture");
    this.input.accept = TYPES.join();
    this.button.addEventListener("click", () => this.input.click());
    this.input.addEventListener("change", async () => {
      await this.add([...this.input.files]);
      this.input.value = ""; // the same file may be chosen again
    });
    byId("prompt").addEventListener("paste", (event) => this.#onFiles(event, event.clipboardData));
    const view = byId("chat-view");
    view.addEventListener("dragover", (event) => this.isOn && event.preventDefault());
    view.addEventListener("drop", (event) => this.#onFiles(event, event.dataTransfer));
  }

  /** Whether the model sees pictures. */
  enable(isOn) {
    if (isOn === this.isOn) return;
    this.isOn = isOn;
    this.button.hidden = !isOn;
    byId("composer").classList.toggle("takes-pictures", isOn);
    if (!isOn) this.take();
  }

  /** Read files; what is no picture that servers take is refused aloud. */
  async add(files) {
    for (const file of files) {
      if (!TYPES.includes(file.type)) this.announce(`${file.name} is no picture of a kind that is taken`);
      else if (file.size > MAX_BYTES) this.announce(`${file.name} is larger than 20 MiB`);
      else await this.#read(file);
    }
    this.#show();
  }

  async #read(file) {
    try {
      this.chosen.push({ name: file.name, url: await read(file) });
    } catch {
      this.announce(`${file.name} cannot be read`);
    }
  }

  /** The pictures, which the composer forgets. */
  take() {
    const taken = this.chosen;
    this.chosen = [];
    this.#show();
    return taken;
  }

  #onFiles(event, data) {
    if (!this.isOn || !data?.files.length) return;
    event.preventDefault();
    this.add([...data.files]);
  }

  #show() {
    this.list.hidden = this.chosen.length === 0;
    this.list.replaceChildren(
      ...this.chosen.map((picture) => {
        const label = `Remove ${picture.name}`;
        const remove = h("button", { type: "button", class: "icon-button tiny", "aria-label": label, title: label }, icon("close", 14));
        remove.addEventListener("click", () => {
          this.chosen = this.chosen.filter((other) => other !== picture);
          this.#show();
          byId("prompt").focus();
        });
        return h("li", {}, thumbnail(picture), remove);
      }),
    );
    this.onResize();
  }
}

/** A picture as it is shown in a message and above the composer. */
export const thumbnail = ({ name, url }) => h("img", { src: url, alt: name });

/** A message's content for the API; `urlOf` a picture may be something else than its data. */
export function contentOf({ content, images = [] }, urlOf = (picture) => picture.url) {
  if (!images.length) return content;
  const parts = images.map((picture) => ({ type: "image_url", image_url: { url: urlOf(picture) } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
