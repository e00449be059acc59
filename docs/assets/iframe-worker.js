// A browser starts no worker for a page that was opened as a file; the search then runs in a frame of the page.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.document.write(
        "<script>postMessage = (data) => frameElement.answer(data)</scr" + `ipt><script src="${url}"></scr` + "ipt>",
      );
      frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => frame.addEventListener("load", resolve));
      inner.document.close();
      this.inner = inner;
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
