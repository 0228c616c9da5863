// Which page is shown, and the parts that all share.
"use strict";

(() => {
  const PAGES = {
    overview: {nav: "overview", show: showOverview},
    model: {nav: "overview", show: showModel},
    tasks: {nav: "tasks", show: showTasks},
    task: {nav: "tasks", show: showTask},
    compare: {nav: "compare", show: showCompare},
    findings: {nav: "findings", show: showFindings},
    about: {nav: "about", show: showAbout},
  };
  const main = document.getElementById("main");
  let board = null;
  let leave = null;
  let first = true;

  async function navigate() {
    const {page, parts, query} = readAddress();
    const {nav, show} = PAGES[page] ?? PAGES.overview;
    for (const anchor of document.querySelectorAll("nav [data-page]"))
      if (anchor.dataset.page === nav) anchor.setAttribute("aria-current", "page");
      else anchor.removeAttribute("aria-current");
    leave?.();
    leave = null;
    const page_ = element("div", {class: `page page-${page}`});
    fill(main, page_);
    const current = new AbortController();
    leave = () => current.abort();
    try {
      const title =
        board.empty && page !== "about"
          ? showEmpty(page_, board)
          : await show(page_, {board, parts, query, signal: current.signal});
      if (current.signal.aborted) return;
      document.title = title ? `${title} · Leaderboard` : "Leaderboard";
      if (!first) {
        window.scrollTo(0, 0);
        const heading = page_.querySelector("h1");
        heading?.setAttribute("tabindex", "-1");
        heading?.focus({preventScroll: true});
      }
    } catch (error) {
      if (current.signal.aborted) return;
      fill(page_, failure(error));
    }
    if (first) performance.mark("interactive");
    first = false;
    document.body.dataset.ready = page;
  }

  const failure = (error) =>
    element(
      "div",
      {class: "notice", role: "alert"},
      element("h1", {}, "This page cannot be shown"),
      element("p", {}, error.message),
    );

  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });

  // A menu closes when something else is used, and by Escape, which gives the focus back to it.
  document.addEventListener("click", (event) => {
    for (const menu of document.querySelectorAll("details.menu[open]"))
      if (!menu.contains(event.target)) menu.open = false;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  });

  harnessExt
    .load("index")
    .then((index) => {
      board = new Board(index);
      window.addEventListener("hashchange", () => {
        delete document.body.dataset.ready;
        navigate();
      });
      return navigate();
    })
    .catch((error) => fill(main, failure(error)));
})();
