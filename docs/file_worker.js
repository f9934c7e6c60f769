// The search of the site runs in a Worker, and browsers refuse one for pages opened from a folder. There it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(given) {
      super();
      const url = new URL(given, location.href);
      const frame = document.createElement("iframe"), waiting = [];
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const tell = (target, data) => target.dispatchEvent(new MessageEvent("message", {data}));
      inside.postMessage = data => { const event = new MessageEvent("message", {data}); if (this.onmessage) this.onmessage(event); this.dispatchEvent(event); };
      inside.importScripts = (...urls) => Promise.all(urls.map(one => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = new URL(one, url); script.onload = done; script.onerror = failed;
        inside.document.body.append(script);
      })));
      this.postMessage = data => waiting.push(data);
      inside.importScripts(url).then(() => { this.postMessage = data => tell(inside, data); waiting.forEach(this.postMessage); });
      this.terminate = () => frame.remove();
    }
  };
}
