// node search_from_disk.js SITE WORD: search the built site as a page that is read from disk does, with the least of a
// browser that assets/iframe-worker.js needs. Prints the locations of the pages found, the best first, one per line.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, word] = process.argv.slice(2);
const read = (...parts) => fs.readFileSync(path.join(site, ...parts), "utf8");

function element() {
  const made = new EventTarget();
  made.remove = () => {};
  return made;
}

function frameWindow() {
  const inside = new EventTarget();
  const bound = { addEventListener: inside.addEventListener.bind(inside), dispatchEvent: inside.dispatchEvent.bind(inside) };
  const context = vm.createContext(Object.assign(bound, { MessageEvent, console, document: { createElement: element } }));
  context.self = context.window = context;
  context.document.head = {
    append(script) {
      vm.runInContext(fs.readFileSync(new URL(script.src), "utf8"), context);
      script.dispatchEvent(new Event("load"));
    },
  };
  return context;
}

const page = { MessageEvent, EventTarget, Event, URL, Promise, Error, location: { protocol: "file:" } };
page.window = page;
page.document = {
  baseURI: `file://${site}/index.html`,
  createElement: element,
  body: {
    append(frame) {
      frame.contentWindow = frameWindow();
      frame.dispatchEvent(new Event("load"));
    },
  },
};
vm.createContext(page);
vm.runInContext(read("assets", "iframe-worker.js"), page);
vm.runInContext(read("search", "search_index.js"), page);

const program = fs.readdirSync(path.join(site, "assets/javascripts/workers")).find((name) => name.endsWith(".js"));
const worker = new page.Worker(`file://${site}/assets/javascripts/workers/${program}`);
worker.addEventListener("message", ({ data }) => {
  if (data.type === 1) worker.postMessage({ type: 2, data: word }); // ready
  if (data.type === 3) data.data.items.forEach((group) => console.log(group[0].location));
});
worker.postMessage({ type: 0, data: { ...page.__index, options: { suggest: false } } });
