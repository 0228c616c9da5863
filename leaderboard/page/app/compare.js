// Two models on the documents that both answered: paired statistics, and the documents on which they disagree.
"use strict";

const {showCompare} = (() => {
  const AT_ONCE = 20_000; // models times tasks whose documents are read without being asked: a file has all models of a task
  const DOCUMENTS = 25;
  const SENTENCES = 3; // tasks of which the result is said in words

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
    const verdict = element("div", {class: "verdicts"});
    const tableHost = element("div");
    const more = element("p");
    const legend = element("p", {class: "muted small", hidden: true}, "† on a part of the documents");
    const documents = element("div");
    const rest = element("div");
    const chart = figure({
      title: "A − B",
      note: "paired, with 95 % bootstrap intervals",
      signal,
      describe: "Differences of the two models on each task; the table has the same numbers.",
      draw,
    });
    chart.hidden = true;
    const tasks = section(
      "Tasks",
      verdict,
      chart,
      tableHost,
      more,
      element(
        "p",
        {class: "muted small"},
        "The difference is paired: both models on the same documents. p is of McNemar's exact test, two-sided; the interval is of 2,000 bootstrap draws of documents. With many tasks some p are small by chance.",
      ),
    );
    page.append(tasks, documents, rest, legend);

    const done = () => shared.filter(({result}) => result && !result.refused);
    const drawn = () => done().filter(({column}) => column.bounded);

    function draw(width) {
      const rows = drawn();
      const left = Math.min(230, width * 0.42);
      const labels = rows.map(({column}) => column.id);
      const names = new Map(rows.map(({column}) => [column.id, column.label]));
      return Plot.plot({
        ...plotOptions(width, 64 + 22 * rows.length),
        marginLeft: left,
        marginTop: 8,
        x: axisBelow("A − B, points of 100", {grid: true, nice: true}),
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
              `${column.label}\n${showDifference(result.difference, column)} ${showEnds(result, column)}`,
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
      const scores = ({a, b, column}) => [show(a, column), show(b, column)];
      const taskLink = ({column}) => link(address("task", [column.id]), column.label);
      const refused = shared.filter(({result}) => result?.refused);
      const others = shared.filter(({result}) => !result?.refused);
      const scroller = () => tableHost.querySelector(".table-scroll");
      const scrolled = scroller()?.scrollLeft ?? 0;
      fill(
        tableHost,
        others.length
          ? dataTable(
              "Paired comparison",
              [
                ["Task"],
                ["A − B", {number: true}],
                ["p", {number: true}],
                ["A", {number: true}],
                ["B", {number: true}],
                ["A alone right", {number: true}],
                ["B alone right", {number: true}],
                ["Documents", {number: true}],
                [visuallyHidden("Documents on which they disagree")],
              ],
              others.map((entry) => {
                const {column, result} = entry;
                if (!result)
                  return [
                    taskLink(entry),
                    "",
                    "",
                    ...scores(entry),
                    "",
                    "",
                    "",
                    entry.busy
                      ? element("span", {class: "muted"}, "reading …")
                      : element(
                          "button",
                          {type: "button", class: "button small", on: {click: () => run([entry])}},
                          "Compare documents",
                        ),
                  ];
                return [
                  taskLink(entry),
                  [
                    showDifference(result.difference, column),
                    " ",
                    element("span", {class: "interval"}, showEnds(result, column)),
                  ],
                  result.p === null ? "" : showP(result.p),
                  ...scores(entry),
                  result.p === null ? "" : showCount(result.b),
                  result.p === null ? "" : showCount(result.c),
                  [showCount(result.n), result.part ? " †" : ""],
                  documentsButton(entry),
                ];
              }),
            )
          : null,
      );
      fill(rest, refused.length ? notCompared(refused, taskLink, scores) : null);
      tasks.hidden = !others.length;
      fill(verdict, verdicts(done()));
      if (others.length) scroller().scrollLeft = scrolled;
      const isPart = ({a, b, result}) => a.limit !== null || b.limit !== null || result?.part;
      legend.hidden = !shared.some(isPart);
      const waiting = shared.filter(({result, busy}) => !result && !busy);
      fill(
        more,
        waiting.length
          ? element(
              "button",
              {type: "button", class: "button", on: {click: () => run(waiting)}},
              `Compare documents of the other ${plural(waiting.length, "task")}`,
            )
          : null,
      );
      chart.hidden = drawn().length === 0;
      if (!chart.hidden) chart.redraw();
    }

    /** Tasks without documents that both have; a reason that all give is said once. */
    function notCompared(refused, taskLink, scores) {
      const reasons = new Set(refused.map(({result}) => result.refused));
      return section(
        `${plural(refused.length, "task")} not compared by document`,
        reasons.size === 1
          ? element("p", {class: "muted"}, `${upperFirst([...reasons][0])}. The intervals are of each model alone.`)
          : null,
        dataTable(
          "Tasks not compared by document",
          [["Task"], ["A", {number: true}], ["B", {number: true}], ...(reasons.size > 1 ? [["Why"]] : [])],
          refused.map((entry) => [
            taskLink(entry),
            ...scores(entry),
            ...(reasons.size > 1 ? [element("span", {class: "muted small"}, entry.result.refused)] : []),
          ]),
        ),
      );
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
      // With a single task there is nothing to choose.
      if (done().length === 1 && !signal.aborted) showDocuments(done()[0], {move: false});
    }

    const documentsButton = (entry) =>
      element(
        "button",
        {
          type: "button",
          class: "button small",
          "aria-label": `Documents of ${entry.column.label} on which they disagree`,
          on: {click: () => showDocuments(entry)},
        },
        "Documents",
      );

    /** Who is better, by how much and how sure that is; of many tasks, how often. */
    function verdicts(entries) {
      if (!entries.length) return null;
      const better = {A: 0, B: 0, neither: 0};
      for (const entry of entries) better[winner(entry)]++;
      if (entries.length > SENTENCES)
        return element(
          "p",
          {},
          `Of ${plural(entries.length, "task")} compared by document, `,
          element("b", {}, `A is better on ${showCount(better.A)}, B on ${showCount(better.B)}`),
          `, and on ${showCount(better.neither)} no difference is shown: the interval has 0 in it.`,
        );
      return entries.map((entry) => {
        const {column, result} = entry;
        const [won, size] = [winner(entry), showDifference(Math.abs(result.difference), column)];
        const unit = column.bounded ? " points" : "";
        return element(
          "p",
          {},
          element("bdi", {}, column.label),
          ": ",
          won === "neither"
            ? element("b", {}, "no difference is shown")
            : element("b", {}, `${won} is better by ${size}${unit}`),
          `; A\u00a0−\u00a0B is ${showDifference(result.difference, column)}, 95\u00a0% interval ${showEnds(result, column)}`,
          result.p === null ? ". " : `, p\u00a0=\u00a0${showP(result.p)}. `,
          result.p === null
            ? `On ${showCount(result.b + result.c)} of ${plural(result.n, "document")} they differ.`
            : `Of ${plural(result.n, "document")} A alone has ${showCount(result.b)} right, B alone ${showCount(result.c)}.`,
        );
      });
    }

    async function showDocuments({column, result}, {move = true} = {}) {
      const {documents: texts} = await harnessExt.load(`documents/${column.id}`);
      if (signal.aborted) return;
      const byKey = new Map(texts.map((document) => [document.key, document]));
      const all = result.aligned.keys
        .map((key, at) => ({key, a: result.aligned.first[at], b: result.aligned.second[at], document: byKey.get(key)}))
        .filter(({a, b}) => a !== b);
      const known = all.filter(({document}) => document);
      const state = {side: "all", count: DOCUMENTS};
      const list = element("div");
      const isBetter = ({a, b}) => (column.better ? a > b : a < b);
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
        element("option", {value: "a"}, `A does better (${showCount(known.filter(isBetter).length)})`),
        element("option", {value: "b"}, `B does better (${showCount(known.length - known.filter(isBetter).length)})`),
      );
      function paintList() {
        const chosen = known.filter((entry) => state.side === "all" || isBetter(entry) === (state.side === "a"));
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
                    " ",
                    element("span", {class: `verdict ${isBetter({a, b}) ? "better" : ""}`}, `A ${answer(a)}`),
                    " ",
                    element("span", {class: `verdict ${isBetter({a, b}) ? "" : "better"}`}, `B ${answer(b)}`),
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
            all.length > known.length
              ? ` Shown are ${showCount(known.length)}: texts are kept of the documents that split all models of the task most evenly.`
              : "",
          ),
          known.length ? element("p", {class: "inline-field"}, element("label", {for: "side"}, "Show "), side) : null,
          list,
        ),
      );
      paintList();
      if (!move) return;
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
    const difference = a.value - b.value;
    return element(
      "p",
      {},
      "Loss: A ",
      element("b", {}, fixed(a.value, 4)),
      ", B ",
      element("b", {}, fixed(b.value, 4)),
      ` ${axis.unit}; A\u00a0−\u00a0B is ${fixed(difference, 4)} ${known ? `± ${half.toFixed(4)}` : "(no interval)"} (`,
      element("bdi", {}, axis.label),
      "). ",
      !known ? null : Math.abs(difference) > half ? "They differ in loss." : "No difference in loss is shown.",
    );
  }

  const upperFirst = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

  const showDifference = (value, column) => (column.bounded ? percent(value) : significant(value));

  const showEnds = ({low, high}, column) => `[${showDifference(low, column)}, ${showDifference(high, column)}]`;

  /** "A" or "B" where the interval is on one side of 0. */
  function winner({column, result: {low, high}}) {
    if (low <= 0 && high >= 0) return "neither";
    return low > 0 === column.better ? "A" : "B";
  }

  const showP = (p) => (p < 1e-4 ? significant(p, 2) : p.toFixed(4));

  function seedOf(text) {
    let seed = 0;
    for (const character of text) seed = (Math.imul(seed, 31) + character.codePointAt(0)) >>> 0;
    return seed;
  }

  return {showCompare};
})();
