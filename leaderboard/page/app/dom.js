// Elements made by hand. Everything that comes from a result file enters the page as the text of a node or as the value
// of an attribute, never as markup.
"use strict";

const {element, fill, announce, link, breakable, visuallyHidden, clip} = (() => {
  const SVG = new Set(["svg", "path", "line", "circle", "rect", "g", "title"]);

  /**
   * Make an element.
   * @param {string} tag Its name.
   * @param {Object} [properties] Attributes; `on` maps event names to listeners, `data` to data- attributes. null and false are
   *   left out, true is an empty attribute.
   * @param {...(Node|string|number|null|Array)} children Nodes as they are, everything else as text.
   */
  function element(tag, properties = {}, ...children) {
    const node = SVG.has(tag)
      ? document.createElementNS("http://www.w3.org/2000/svg", tag)
      : document.createElement(tag);
    for (const [name, value] of Object.entries(properties ?? {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
      else if (name === "data") Object.assign(node.dataset, value);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    node.append(...flat(children));
    return node;
  }

  const flat = (children) =>
    children
      .flat(Infinity)
      .filter((child) => child !== null && child !== undefined && child !== false)
      .map((child) => (child instanceof Node ? child : String(child)));

  /** Replace what a node holds. */
  function fill(node, ...children) {
    node.replaceChildren(...flat(children));
    return node;
  }

  /** Say something to a screen reader without moving the focus. */
  function announce(text) {
    const live = document.getElementById("announcement");
    live.textContent = "";
    requestAnimationFrame(() => (live.textContent = text));
  }

  /** A link within the page; `bdi` keeps a name in a right-to-left script from turning its neighbours round. */
  const link = (hash, text, properties = {}) =>
    element("a", {href: hash, ...properties}, element("bdi", {}, breakable(text)));

  /** A name that may be broken after its underscores and slashes, before it is broken anywhere. */
  const breakable = (text) => text.split(/(?<=[_/])/).map((part, at) => [at ? element("wbr") : null, part]);

  const visuallyHidden = (text) => element("span", {class: "visually-hidden"}, text);

  /** The beginning of a text that may be long. */
  function clip(text, length) {
    const characters = Array.from(text);
    return characters.length <= length ? text : `${characters.slice(0, length - 1).join("")}…`;
  }

  return {element, fill, announce, link, breakable, visuallyHidden, clip};
})();
