// The site's search runs in a worker, which browsers refuse to pages that are opened as files.
// There a hidden frame runs the worker's script instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.document.open()
      inside.document.write("<body>")
      inside.document.close()
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      this.ready = new Promise(done => (script.onload = done))
      script.src = url
      inside.document.body.append(script)
      this.inside = inside
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
