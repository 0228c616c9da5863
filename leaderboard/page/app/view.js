// What is chosen on the first page, to and from the address, and everything that follows from it.
"use strict";

const {META, META_LABELS, readView, viewQuery, defaultTolerance, workOut, passes} = (() => {
  const META = ["name", "family", "size", "group", "rank", "loss", "flatness", "mean", "wins", "borda"];
  const META_LABELS = {
    family: "Family",
    size: "Parameters",
    group: "Loss group",
    rank: "Rank in group",
    loss: "Loss",
    flatness: "Flatness",
    mean: "Mean of shown tasks",
    wins: "Mean win rate",
    borda: "Borda points",
  };
  const META_HIDDEN = new Set(["family", "wins", "borda"]);
  const TASKS_AT_FIRST = 12;
  const Z_GROUPS = 1.645; // as in harness_ext/loss_groups.py

  /** What is chosen, from the address, with defaults that depend on the board. */
  function readView(board, query) {
    const number = (name) => {
      const value = Number.parseFloat(query.get(name));
      return Number.isFinite(value) ? value : null;
    };
    const axis = board.axes.find(({id}) => id === query.get("axis")) ?? board.axes[0] ?? null;
    const limited = query.get("limited") === "1" || !board.hasFull.some(Boolean);
    const shown = query.has("columns")
      ? query
          .get("columns")
          .split(".")
          .filter((id) => META.includes(id) || board.columnById.has(id))
      : defaultColumns(board);
    const brush = query.get("brush")?.split("_").map(Number) ?? [];
    return {
      search: query.get("search") ?? "",
      families: query.get("families")?.split("\u001f") ?? [],
      sizeLow: number("min"),
      sizeHigh: number("max"),
      task: board.columnById.has(query.get("task")) ? query.get("task") : "",
      group: number("group"),
      limited,
      axis,
      tolerance: number("tolerance") ?? defaultTolerance(board, axis),
      downstream: board.columnById.has(query.get("downstream")) ? query.get("downstream") : null,
      flatness: board.flatnessKinds.find(({id}) => id === query.get("flatness")) ?? board.flatnessKinds[0] ?? null,
      columns: shown,
      sorting:
        query
          .get("sort")
          ?.split(".")
          .map((part) => ({id: part.replace(/^~/, ""), desc: part.startsWith("~")})) ?? null,
      brush: brush.length === 4 && brush.every(Number.isFinite) ? brush : null,
      plot: query.get("plot") !== "0",
    };
  }

  /**
   * Tasks that many models share, so that their mean exists: from the most results to the fewest, each that leaves complete at
   * least half as many models as the first one has.
   */
  function defaultColumns(board) {
    const having = (column) =>
      column.full ? board.models.filter(({place}) => !Number.isNaN(column.full.value[place])) : [];
    const counted = board.downstream
      .map((column) => ({column, models: having(column)}))
      .sort((a, b) => b.models.length - a.models.length || a.column.place - b.column.place);
    const kept = new Set();
    let complete = counted[0]?.models ?? [];
    for (const {column, models} of counted) {
      if (kept.size === TASKS_AT_FIRST) break;
      const has = new Set(models);
      const both = complete.filter((model) => has.has(model));
      if (2 * both.length < counted[0].models.length) continue;
      complete = both;
      kept.add(column.id);
    }
    const meta = META.filter((id) => !META_HIDDEN.has(id))
      .filter((id) => (id !== "loss" && id !== "group" && id !== "rank") || board.axes.length)
      .filter((id) => id !== "flatness" || board.flatnessKinds.length);
    return [...meta, ...board.downstream.filter(({id}) => kept.has(id)).map(({id}) => id)];
  }

  function defaultTolerance(board, axis) {
    if (!axis) return 0;
    const known = board.index.groups.find(
      (group) => group.text === axis.text && (axis.measure !== "nats_per_token") === !axis.text.startsWith("excess/"),
    );
    return known?.tolerance ?? 0.01;
  }

  function viewQuery(board, state) {
    const fallback = readView(board, new URLSearchParams());
    const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
    return {
      search: state.search || null,
      families: state.families.length ? state.families.join("\u001f") : null,
      min: state.sizeLow,
      max: state.sizeHigh,
      task: state.task || null,
      group: state.group,
      limited: state.limited && !fallback.limited ? "1" : null,
      axis: state.axis === fallback.axis ? null : state.axis.id,
      tolerance: state.axis && state.tolerance !== defaultTolerance(board, state.axis) ? state.tolerance : null,
      downstream: state.downstream,
      flatness: state.flatness === fallback.flatness ? null : state.flatness.id,
      columns: same(state.columns, fallback.columns) ? null : state.columns.join("."),
      sort: state.sorting ? state.sorting.map(({id, desc}) => (desc ? "~" : "") + id).join(".") : null,
      brush: state.brush ? state.brush.map((value) => Number(value.toPrecision(6))).join("_") : null,
      plot: state.plot ? null : "0",
    };
  }

  /**
   * Everything that follows from the state: rows with their groups, ranks and aggregates.
   * @param {Object} kept Aggregates of the last time, which most changes leave as they are.
   */
  function workOut(board, state, kept) {
    const {axis, flatness, limited} = state;
    const places = board.models.map(({place}) => place).filter((place) => limited || board.hasFull[place]);

    const shownTasks = board.downstream.filter(({id}) => state.columns.includes(id));
    // A normalised score needs a chance level, and a metric that is better when higher, of at most one.
    const averaged = shownTasks.filter(
      (column) => column.bounded && column.better && column.chance !== null && column.chance < 1,
    );
    const tasks = averaged.map((column) => ({
      chance: column.chance,
      better: column.better,
      dataset: column.dataset || column.task,
      value: (place) => board.value(column, place, limited),
      stderr: (place) => {
        const {stderr, interval} = board.score(column, place, limited);
        return stderr > 0 ? stderr : interval ? (interval[1] - interval[0]) / (2 * 1.96) : null;
      },
    }));
    const key = `${limited} ${averaged.map(({id}) => id).join()}`;
    if (kept.key !== key) Object.assign(kept, {key, means: aggregates(tasks, places)});
    const {means} = kept;

    const column = state.downstream === null ? null : board.columnById.get(state.downstream);
    const downstream = (place) => {
      if (column) {
        const cell = board.score(column, place, limited);
        return cell && {value: cell.value, interval: cell.interval};
      }
      const {mean, stderr} = means.get(place);
      return mean === null
        ? null
        : {value: mean, interval: stderr === null ? null : [mean - 1.96 * stderr, mean + 1.96 * stderr]};
    };

    const rows = places.map((place) => {
      const loss = axis?.loss.get(place);
      const flat = flatness?.of.get(place);
      return {
        place,
        model: board.models[place],
        loss: loss && (limited || !loss.limit) ? loss : null,
        flatness: flat && (limited || !flat.limit) ? flat : null,
        mean: means.get(place),
        downstream: downstream(place),
        group: null,
        rank: null,
      };
    });

    // Whether a loss without a standard error is equal to another cannot be known.
    const measured = rows.filter((row) => row.loss?.hasStderr);
    const groups = axis
      ? lossGroups(
          measured.map((row) => row.loss.value),
          measured.map((row) => row.loss.stderr),
          {tolerance: state.tolerance, z: Z_GROUPS},
        )
      : [];
    groups.forEach((group, at) => {
      group.number = at + 1;
      group.rows = group.members.map((member) => measured[member]);
      group.low = group.rows[0].loss.value;
      group.high = group.rows.at(-1).loss.value;
      const better = column ? column.better : true;
      const ranked = group.rows.filter((row) => row.downstream?.interval);
      const intervals = ranked.map(
        ({
          downstream: {
            interval: [low, high],
          },
        }) => (better ? {low, high} : {low: -high, high: -low}),
      );
      for (const row of group.rows) row.group = group;
      const ranges = rankRanges(intervals);
      ranked.forEach((row, index) => (row.rank = {range: ranges[index], of: ranked.length}));
    });
    return {rows, groups, averaged, shownTasks, column};
  }

  /** Whether a row passes the filters, and, where `brushed`, lies in what is selected in the plot. */
  function passes(board, state, row, brushed) {
    const {model} = row;
    if (state.search && !matches(model, state.search)) return false;
    if (state.families.length && !state.families.includes(model.family ?? "")) return false;
    if (state.sizeLow !== null && !(model.num_parameters >= state.sizeLow * 1e6)) return false;
    if (state.sizeHigh !== null && !(model.num_parameters <= state.sizeHigh * 1e6)) return false;
    if (state.task && Number.isNaN(board.value(board.columnById.get(state.task), row.place, state.limited)))
      return false;
    if (state.group !== null && row.group?.number !== state.group) return false;
    if (brushed && state.brush) {
      const [x0, x1, y0, y1] = state.brush;
      if (!row.loss || !row.downstream) return false;
      if (row.loss.value < x0 || row.loss.value > x1 || row.downstream.value < y0 || row.downstream.value > y1)
        return false;
    }
    return true;
  }

  const matches = (model, search) => {
    const text = `${model.name} ${model.revision ?? ""} ${model.dtype ?? ""} ${model.family ?? ""}`.toLocaleLowerCase(
      "en",
    );
    return search
      .toLocaleLowerCase("en")
      .split(/\s+/)
      .every((word) => text.includes(word));
  };

  return {META, META_LABELS, readView, viewQuery, defaultTolerance, workOut, passes};
})();
