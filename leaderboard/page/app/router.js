// The address: "#/model/m0123456789ab?tolerance=0.01" is the page `model`, its argument, and what is chosen on it.
"use strict";

const {readAddress, writeAddress, address} = (() => {
  /** @returns {{page: string, parts: string[], query: URLSearchParams}} */
  function readAddress() {
    const text = location.hash.replace(/^#\/?/, "");
    const [path, query = ""] = text.split(/\?(.*)/s);
    const [page, ...parts] = path.split("/").map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
    return {page: page || "overview", parts, query: new URLSearchParams(query)};
  }

  function address(page, parts = [], query = {}) {
    const search = new URLSearchParams(
      Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""),
    );
    const path = page === "overview" ? "#/" : `#/${[page, ...parts].map(encodeURIComponent).join("/")}`;
    return search.size ? `${path}?${search}` : path;
  }

  /** Put what is chosen into the address, without a step in the history. */
  function writeAddress(hash) {
    try {
      history.replaceState(null, "", hash);
    } catch {
      // Safari refuses more than a hundred in half a minute. The next change writes the whole address again.
    }
  }

  return {readAddress, writeAddress, address};
})();
