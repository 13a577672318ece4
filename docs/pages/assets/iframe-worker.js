// Browsers refuse a Worker to a page that is read from disk. There, this one runs the worker's script in a hidden frame
// on the page's own thread, so that the search works without a server. It needs what the search's worker uses: messages
// in both directions, and a script that imports no others.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #started;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      this.#frame.srcdoc = "<!doctype html><title>worker</title>";
      this.#started = new Promise((resolve, reject) => {
        this.#frame.addEventListener("load", () => {
          const inside = this.#frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.addEventListener("load", () => resolve(inside));
          script.addEventListener("error", () => reject(new Error(`${url} can't be read`)));
          script.src = new URL(url, document.baseURI).href;
          inside.document.head.append(script);
        }, { once: true });
      });
      document.body.append(this.#frame);
    }

    postMessage(data) {
      this.#started.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
