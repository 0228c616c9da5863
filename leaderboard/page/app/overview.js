// The first page: the table and the scatter, which share what is chosen. An empty board says how to add a result.
"use strict";

const {showOverview, showEmpty} = (() => {
  function showEmpty(page, board) {
    const code = (text) => element("pre", {class: "code", tabindex: 0}, text);
    fill(
      page,
      element("h1", {}, "No results yet"),
      element(
        "p",
        {class: "lede"},
        "This leaderboard compares language models of equal pretraining loss. Three commands put a model on it.",
      ),
      element(
        "ol",
        {class: "steps"},
        element(
          "li",
          {},
          "Evaluate a model, with its loss and its flatness, and keep right and wrong by document:",
          code(
            "lm_eval --model hf --model_args pretrained=HuggingFaceTB/SmolLM2-135M \\\n    --tasks natural,loss_wikitext,flatness_wikitext \\\n    --log_samples --output_path results",
          ),
        ),
        element(
          "li",
          {},
          "Check the result file as CI does, and copy it into the leaderboard's folder:",
          code("harness-ext leaderboard add results/…/results_….json"),
        ),
        element("li", {}, "Build these pages again:", code("harness-ext leaderboard build")),
      ),
      board.index.unreadable.length
        ? element(
            "p",
            {class: "notice"},
            link("#/about", `${plural(board.index.unreadable.length, "file")} could not be used.`),
          )
        : null,
    );
    return "No results yet";
  }

  function showOverview(page, {board, query, signal}) {
    const state = readView(board, query);
    const picked = new Set((query.get("picked") ?? "").split(".").filter((id) => board.place.has(id)));
    const kept = {};
    let derived = workOut(board, state, kept);

    const defaultSorting = () =>
      derived.groups.length && state.columns.includes("group")
        ? [
            {id: "group", desc: false},
            {id: downstreamSort(), desc: true},
          ]
        : [{id: downstreamSort(), desc: derived.column ? derived.column.better : true}];
    const downstreamSort = () =>
      state.downstream && state.columns.includes(state.downstream) ? state.downstream : "mean";

    const summary = element("p", {class: "summary", role: "status", id: "summary"});
    const hidden = board.index.hidden;
    const gridHost = element("div", {class: "grid-host"});
    const scatterHost = element("div", {class: "scatter-host"});
    const pickBar = element("div", {class: "pick-bar", hidden: true});

    const grid = new Grid(gridHost, {
      label: "Models. Arrow keys move, Enter sorts by a heading or opens a model, Space picks a model for comparison.",
      columns: gridColumns(board, state),
      rowId: (row) => row.model.id,
      onSort: (sorting) => {
        state.sorting = sorting;
        update({sort: true});
      },
      onOpen: (row) => (location.hash = address("model", [row.model.id])),
      onPick: (row) => {
        if (picked.has(row.model.id)) picked.delete(row.model.id);
        else picked.add(row.model.id);
        announce(
          `${row.model.name} ${picked.has(row.model.id) ? "picked" : "no longer picked"}, ${plural(picked.size, "model")} picked`,
        );
        grid.repaint();
        paintPicked();
        remember();
      },
      isPicked: (row) => picked.has(row.model.id),
      rowClass: (row, above, sorting) => {
        const grouped = sorting[0]?.id === "group" && row.group;
        return [
          grouped && row.group.number % 2 ? "group-odd" : "",
          sorting[0]?.id === "group" && above && above.group !== row.group ? "group-start" : "",
          board.hasFull[row.place] ? "" : "only-limited",
        ].join(" ");
      },
    });
    signal.addEventListener("abort", () => grid.destroy());

    const controls = makeControls(board, state, () => derived, update);
    fill(
      page,
      element(
        "div",
        {class: "title-row"},
        element("h1", {}, "Models of equal pretraining loss, compared"),
        element(
          "p",
          {class: "lede"},
          `${plural(board.models.length, "model")}, ${plural(board.downstream.length, "task")}. Scores are in per cent with 95 % intervals.`,
          hidden.limited_scores && !state.limited
            ? [
                " ",
                element(
                  "span",
                  {class: "muted"},
                  `${plural(hidden.limited_scores, "score")} of limited runs ${hidden.limited_scores === 1 ? "is" : "are"} hidden.`,
                ),
              ]
            : null,
          board.index.unreadable.length
            ? [" ", link("#/about", `${plural(board.index.unreadable.length, "file")} could not be used.`)]
            : null,
        ),
      ),
      controls.node,
      scatterHost,
      element(
        "div",
        {class: "table-head"},
        summary,
        element("span", {class: "spring"}),
        downloads(board),
        controls.columns,
      ),
      pickBar,
      gridHost,
      legend(),
    );

    const scatter = makeScatter(scatterHost, {
      board,
      state,
      derived: () => derived,
      shown: () => shownPlaces,
      signal,
      update,
    });
    let shownPlaces = new Set();

    /** @param {{data?: boolean, sort?: boolean, columns?: boolean}} changed What must be done again. */
    function update(changed = {}) {
      if (changed.data) {
        derived = workOut(board, state, kept);
        if (state.group !== null && state.group > derived.groups.length) state.group = null;
        grid.setRows(derived.rows);
      }
      if (changed.data || changed.columns) grid.setVisible(["name", ...state.columns]);
      grid.setSorting(state.sorting ?? defaultSorting());
      grid.setFilter((row) => passes(board, state, row, true));
      grid.refresh();
      shownPlaces = new Set(derived.rows.filter((row) => passes(board, state, row, false)).map((row) => row.place));
      const of = derived.rows.length;
      const withoutError = derived.rows.filter((row) => row.loss && !row.loss.hasStderr).length;
      const text = [
        grid.rows.length === of ? plural(of, "model") : `${showCount(grid.rows.length)} of ${plural(of, "model")}`,
        state.axis
          ? `${plural(derived.groups.length, "loss group")} with ${plural(
              derived.groups.reduce((sum, group) => sum + group.rows.length, 0),
              "model",
            )}`
          : null,
        withoutError ? `${plural(withoutError, "loss", "losses")} without standard error, in no group` : null,
      ]
        .filter(Boolean)
        .join(" · ");
      if (summary.textContent !== text) summary.textContent = text;
      controls.refresh();
      if (!changed.sort) scatter.schedule();
      remember();
    }

    let timer = 0;
    function remember() {
      clearTimeout(timer);
      timer = setTimeout(() => {
        if (!signal.aborted)
          writeAddress(address("overview", [], {...viewQuery(board, state), picked: [...picked].join(".") || null}));
      }, 150);
    }

    function paintPicked() {
      pickBar.hidden = picked.size === 0;
      const ids = [...picked];
      fill(
        pickBar,
        element(
          "span",
          {},
          `${plural(ids.length, "model")} picked: `,
          ids
            .slice(0, 4)
            .map((id, at) => [at ? ", " : "", element("bdi", {class: "clip"}, board.models[board.place.get(id)].name)]),
          ids.length > 4 ? ", …" : "",
        ),
        element("span", {class: "spring"}),
        ids.length === 2
          ? element("a", {class: "button primary", href: address("compare", ids)}, "Compare the two")
          : element(
              "span",
              {class: "muted"},
              ids.length < 2 ? "Pick a second one to compare them." : "Two can be compared at a time.",
            ),
        element(
          "button",
          {
            type: "button",
            class: "button",
            on: {
              click: () => {
                picked.clear();
                grid.repaint();
                paintPicked();
                remember();
              },
            },
          },
          "Clear",
        ),
      );
    }

    signal.addEventListener("abort", () => clearTimeout(timer));
    update({data: true, columns: true});
    paintPicked();
    return null;
  }

  function downloads(board) {
    const files = board.index.downloads ?? [];
    return files.length
      ? element(
          "span",
          {class: "downloads"},
          "Download: ",
          files.map(({path, label}, at) => [at ? " · " : "", element("a", {href: path, download: true}, label)]),
        )
      : null;
  }

  const legend = () =>
    element(
      "p",
      {class: "legend muted"},
      "An empty cell is a task without a result. ",
      element("b", {}, "†"),
      " limited run · ",
      element("b", {}, "≠"),
      " runs found different numbers · ",
      element("b", {}, "*"),
      " has a note · ",
      element("b", {}, "‡"),
      " results of more than one lm_eval version. ",
      "Ranks are those that the 95 % intervals leave open.",
    );

  return {showOverview, showEmpty};
})();
