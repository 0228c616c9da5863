// Two models on the documents that both answered: paired statistics, and the documents on which they disagree.
"use strict";

const {showCompare} = (() => {
  const AT_ONCE = 20_000; // models times tasks whose documents are read without being asked: a file has all models of a task
  const DOCUMENTS = 25;

  function showCompare(page, {board, parts, signal}) {
    const [first, second] = parts.map((id) => board.models[board.place.get(id)] ?? null);
    const select = (label, chosen, at) => {
      const node = element(
        "select",
        {
          id: `model-${at}`,
          on: {
            change: () => {
              const ids = [first?.id ?? "", second?.id ?? ""];
              ids[at] = node.value;
              location.hash = address("compare", ids);
            },
          },
        },
        element("option", {value: ""}, "choose a model"),
        board.models.map((model) =>
          element(
            "option",
            {value: model.id, selected: model === chosen},
            [clip(model.name, 70), modelDetails(model)].filter(Boolean).join(", "),
          ),
        ),
      );
      return element("div", {class: "field grow"}, element("label", {for: node.id}, label), node);
    };
    fill(
      page,
      element("h1", {}, "Two models, compared"),
      element("div", {class: "control-row"}, select("A", first, 0), select("B", second, 1)),
    );
    if (!first || !second || first === second) {
      page.append(
        element(
          "p",
          {class: "muted"},
          first && first === second
            ? "These are the same model."
            : "Choose two models. Right and wrong by document come from runs with --log_samples.",
        ),
      );
      return "Compare";
    }
    page.append(
      element(
        "p",
        {class: "lede"},
        "A: ",
        link(address("model", [first.id]), first.name),
        element("span", {class: "muted"}, ` ${modelDetails(first)}`),
        element("br"),
        "B: ",
        link(address("model", [second.id]), second.name),
        element("span", {class: "muted"}, ` ${modelDetails(second)}`),
      ),
      lossLine(board, first, second),
    );

    const shared = board.downstream
      .map((column) => ({
        column,
        a: board.score(column, first.place, true),
        b: board.score(column, second.place, true),
        result: null,
      }))
      .filter(({a, b}) => a && b);
    if (!shared.length) {
      page.append(element("p", {class: "notice"}, "No task has a result of both."));
      return "Compare";
    }
    const tableHost = element("div");
    const more = element("p");
    const documents = element("div");
    const chart = figure({
      title: "A less B",
      note: "paired, with 95 % bootstrap intervals",
      signal,
      describe: "Differences of the two models on each task; the table has the same numbers.",
      draw,
    });
    chart.hidden = true;
    page.append(
      section(
        "Tasks",
        chart,
        tableHost,
        more,
        element(
          "p",
          {class: "muted small"},
          "The difference is paired: both models on the same documents. p is of McNemar's exact test, two-sided; the interval is of 2,000 bootstrap draws of documents. With many tasks some p are small by chance.",
        ),
      ),
      documents,
    );

    const done = () => shared.filter(({result}) => result && !result.refused);

    function draw(width) {
      const rows = done();
      const left = Math.min(230, width * 0.42);
      const labels = rows.map(({column}) => column.id);
      const names = new Map(rows.map(({column}) => [column.id, column.label]));
      return Plot.plot({
        ...plotOptions(width, 64 + 22 * rows.length),
        marginLeft: left,
        marginTop: 8,
        x: axisBelow("A less B, points of 100", {grid: true, nice: true}),
        y: rowNames(labels, left, (id) => names.get(id)),
        marks: [
          Plot.ruleX([0], {strokeOpacity: 0.6}),
          Plot.ruleY(rows, {
            y: ({column}) => column.id,
            x1: ({result}) => 100 * result.low,
            x2: ({result}) => 100 * result.high,
            stroke: ({column}) => kindColour(column.kind),
            strokeWidth: 2,
          }),
          Plot.dot(rows, {
            y: ({column}) => column.id,
            x: ({result}) => 100 * result.difference,
            r: 4,
            fill: ({column}) => kindColour(column.kind),
            tip: true,
            title: ({column, result}) =>
              `${column.label}\n${percent(result.difference)} [${percent(result.low)}, ${percent(result.high)}]`,
          }),
        ],
      });
    }

    async function compute(entry) {
      const file = await harnessExt.load(`columns/${entry.column.id}`);
      const aligned = alignVectors(file, first.id, second.id);
      if (aligned.refused) entry.result = aligned;
      else {
        const differences = aligned.first.map((value, at) => value - aligned.second[at]);
        const binary = [...aligned.first, ...aligned.second].every((value) => value === 0 || value === 1);
        const b = differences.filter((value) => value > 0).length;
        const c = differences.filter((value) => value < 0).length;
        const [low, high] = await pairedBootstrap(differences, {seed: seedOf(first.id + second.id + entry.column.id)});
        entry.result = {
          aligned,
          differences,
          b,
          c,
          n: differences.length,
          p: binary ? mcnemar(b, c) : null,
          low,
          high,
          part: aligned.part,
          difference: differences.reduce((sum, value) => sum + value, 0) / differences.length,
        };
      }
      if (!signal.aborted) paint();
    }

    function paint() {
      const show = (cell, column) => [
        showScore(cell.value, column.bounded),
        " ",
        element("span", {class: "interval"}, showInterval(cell.interval, column.bounded)),
        cell.limit !== null ? " †" : "",
      ];
      const table = tableHost.lastElementChild;
      const scrolled = table?.scrollLeft ?? 0;
      // Where no task compares and for one reason, it is said once.
      const reasons = new Set(shared.map(({result}) => result?.refused));
      const reason = reasons.size === 1 ? ([...reasons][0] ?? null) : null;
      fill(
        tableHost,
        reason === null ? null : element("p", {class: "notice"}, "Not compared by document: ", reason, "."),
        dataTable(
          "Paired comparison",
          [
            ["Task"],
            ["A", {number: true}],
            ["B", {number: true}],
            ["A less B", {number: true}],
            ["A alone right", {number: true}],
            ["B alone right", {number: true}],
            ["Documents", {number: true}],
            ["p", {number: true}],
            [visuallyHidden("Documents on which they disagree")],
          ],
          shared.map((entry) => {
            const {column, a, b, result} = entry;
            const left = [link(address("task", [column.id]), column.label), show(a, column), show(b, column)];
            const without = (note) => [...left, ...Array(5).fill(""), note];
            if (!result)
              return without(
                entry.busy
                  ? element("span", {class: "muted"}, "reading …")
                  : element(
                      "button",
                      {type: "button", class: "button small", on: {click: () => run([entry])}},
                      "Compare documents",
                    ),
              );
            if (result.refused)
              return without(
                reason === null ? element("span", {class: "muted small"}, "not compared: ", result.refused) : "",
              );
            return [
              ...left,
              [
                percent(result.difference),
                " ",
                element("span", {class: "interval"}, `[${percent(result.low)}, ${percent(result.high)}]`),
              ],
              showCount(result.b),
              showCount(result.c),
              [showCount(result.n), result.part ? " †" : ""],
              result.p === null ? "" : showP(result.p),
              element(
                "button",
                {
                  type: "button",
                  class: "button small",
                  "aria-label": `Documents of ${column.label} on which they disagree`,
                  on: {click: () => showDocuments(entry)},
                },
                "Documents",
              ),
            ];
          }),
        ),
      );
      tableHost.lastElementChild.scrollLeft = scrolled;
      const rest = shared.filter(({result, busy}) => !result && !busy);
      fill(
        more,
        rest.length
          ? element(
              "button",
              {type: "button", class: "button", on: {click: () => run(rest)}},
              `Compare documents of the other ${plural(rest.length, "task")}`,
            )
          : null,
      );
      chart.hidden = done().length === 0;
      if (!chart.hidden) chart.redraw();
    }

    async function run(entries) {
      for (const entry of entries) entry.busy = true;
      paint();
      for (const entry of entries) {
        if (signal.aborted) return;
        try {
          await compute(entry);
        } catch (error) {
          entry.result = {refused: error.message};
          paint();
        }
      }
      page.dataset.compared = done().length;
    }

    async function showDocuments({column, result}) {
      const {documents: texts} = await harnessExt.load(`documents/${column.id}`);
      if (signal.aborted) return;
      const byKey = new Map(texts.map((document) => [document.key, document]));
      const all = result.aligned.keys
        .map((key, at) => ({key, a: result.aligned.first[at], b: result.aligned.second[at], document: byKey.get(key)}))
        .filter(({a, b}) => a !== b);
      const known = all.filter(({document}) => document);
      const state = {side: "all", count: DOCUMENTS};
      const list = element("div");
      const answer = (value) => (value === 1 ? "right" : value === 0 ? "wrong" : significant(value));
      const side = element(
        "select",
        {
          id: "side",
          on: {
            change: () => {
              state.side = side.value;
              state.count = DOCUMENTS;
              paintList();
            },
          },
        },
        element("option", {value: "all"}, `all (${showCount(known.length)})`),
        element("option", {value: "a"}, `A does better (${showCount(known.filter(({a, b}) => a > b).length)})`),
        element("option", {value: "b"}, `B does better (${showCount(known.filter(({a, b}) => a < b).length)})`),
      );
      function paintList() {
        const chosen = known.filter(({a, b}) => state.side === "all" || (state.side === "a" ? a > b : b > a));
        fill(
          list,
          element(
            "ol",
            {class: "documents"},
            chosen
              .slice(0, state.count)
              .map(({a, b, document}) =>
                element(
                  "li",
                  {},
                  element("p", {class: "document", dir: "auto"}, document.text),
                  element(
                    "p",
                    {class: "small"},
                    element("span", {class: "muted"}, "target "),
                    element("bdi", {class: "tag word"}, document.target),
                    element("span", {class: `verdict ${a > b ? "better" : ""}`}, `A ${answer(a)}`),
                    element("span", {class: `verdict ${b > a ? "better" : ""}`}, `B ${answer(b)}`),
                  ),
                ),
              ),
          ),
          chosen.length > state.count
            ? element(
                "button",
                {
                  type: "button",
                  class: "button",
                  on: {
                    click: () => {
                      state.count += DOCUMENTS;
                      paintList();
                    },
                  },
                },
                `${showCount(Math.min(DOCUMENTS, chosen.length - state.count))} more of ${showCount(chosen.length)}`,
              )
            : null,
        );
      }
      const heading = element(
        "h2",
        {tabindex: -1},
        "Documents on which they disagree: ",
        element("bdi", {}, column.label),
      );
      fill(
        documents,
        element(
          "section",
          {},
          heading,
          element(
            "p",
            {class: "muted"},
            `${plural(all.length, "document")} of ${showCount(result.n)}.`,
            all.length > known.length ? ` The texts of ${showCount(all.length - known.length)} are not kept here.` : "",
          ),
          known.length ? element("p", {class: "inline-field"}, element("label", {for: "side"}, "Show "), side) : null,
          list,
        ),
      );
      paintList();
      heading.focus({preventScroll: true});
      heading.scrollIntoView({behavior: reducedMotion() ? "auto" : "smooth"});
    }

    paint();
    if (shared.length * board.models.length <= AT_ONCE) run(shared);
    return "Compare";
  }

  function lossLine(board, first, second) {
    const axis = board.axes.find(({loss}) => loss.has(first.place) && loss.has(second.place));
    if (!axis)
      return element("p", {class: "notice"}, "No text has a loss of both: they cannot be said to match in loss.");
    const [a, b] = [axis.loss.get(first.place), axis.loss.get(second.place)];
    const known = a.hasStderr && b.hasStderr;
    const half = 1.96 * Math.hypot(a.stderr, b.stderr);
    return element(
      "p",
      {},
      "Loss: A ",
      element("b", {}, fixed(a.value, 4)),
      ", B ",
      element("b", {}, fixed(b.value, 4)),
      ` ${axis.unit}. `,
      `A less B: ${fixed(a.value - b.value, 4)} ${known ? `± ${half.toFixed(4)}` : "(no interval)"}, `,
      element("bdi", {}, axis.label),
      ".",
    );
  }

  const showP = (p) => (p < 1e-4 ? significant(p, 2) : p.toFixed(4));

  function seedOf(text) {
    let seed = 0;
    for (const character of text) seed = (Math.imul(seed, 31) + character.codePointAt(0)) >>> 0;
    return seed;
  }

  return {showCompare};
})();
