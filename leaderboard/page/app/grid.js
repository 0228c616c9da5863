// A table of many rows: TanStack Table sorts and filters, TanStack Virtual says which rows and columns are in sight, and the
// elements are made here, with the roles and keys of the ARIA grid pattern: one stop of the Tab key, arrows within.
"use strict";

const {Grid} = (() => {
  const {
    constructTable,
    tableFeatures,
    rowSortingFeature,
    columnFilteringFeature,
    columnVisibilityFeature,
    createSortedRowModel,
    createFilteredRowModel,
    storeReactivityBindings,
    Virtualizer,
    elementScroll,
    observeElementOffset,
    observeElementRect,
  } = libraries;

  const features = tableFeatures({
    coreReactivityFeature: storeReactivityBindings(),
    rowSortingFeature,
    columnFilteringFeature,
    columnVisibilityFeature,
    filteredRowModel: createFilteredRowModel(),
    sortedRowModel: createSortedRowModel(),
  });

  const ROW_HEIGHT = 32;

  const byNumber = (a, b, id) => a.getValue(id) - b.getValue(id);
  const collator = new Intl.Collator("en", {numeric: true});
  const byText = (a, b, id) => collator.compare(a.getValue(id), b.getValue(id));

  /** Indexes of a range with its overscan, and others that must be there, ascending. */
  function inRange({startIndex, endIndex, overscan, count}, others) {
    const indexes = [];
    for (let at = Math.max(0, startIndex - overscan); at <= Math.min(count - 1, endIndex + overscan); at++)
      indexes.push(at);
    for (const other of others) if (other >= 0 && other < count && !indexes.includes(other)) indexes.push(other);
    return indexes.sort((a, b) => a - b);
  }

  /**
   * @typedef {Object} GridColumn
   * @property {string} id
   * @property {string} label Heading. @property {string} [title] All of it.
   * @property {string|function(): string} [unit] Second line of the heading.
   * @property {number} width In pixels.
   * @property {boolean} [text] Left-aligned, sorted as text.
   * @property {boolean} [descending] Which way the first sort goes.
   * @property {function(Object): (number|string|undefined)} value Sorts; undefined is a blank, and last.
   * @property {function(Object): ?{text: string, side?: string, marks?: {symbol: string, title: string}[], href?: string, title?: string}}
   *   show What the cell says; null for a blank.
   */
  class Grid {
    /**
     * @param {HTMLElement} host
     * @param {{label: string, columns: GridColumn[], rowId: function(Object): string, onSort: function, onOpen: function(Object),
     *   onPick: function(Object), isPicked: function(Object): boolean, rowClass: function(Object, ?Object): string}} options
     *   The first column is the row's name.
     */
    constructor(host, options) {
      this.options = options;
      this.columns = new Map(options.columns.map((column) => [column.id, column]));
      this.rows = [];
      this.active = {row: -1, column: 0};
      this.elements = new Map();
      this.free = [];
      this.version = 0;
      this.pendingFocus = false;
      this.refreshing = false;

      this.table = constructTable({
        features,
        data: [],
        getRowId: options.rowId,
        enableMultiSort: true,
        enableSortingRemoval: false,
        columns: [
          ...options.columns.map(({id, value, text}) => ({
            id,
            accessorFn: value,
            sortFn: text ? byText : byNumber,
            sortUndefined: "last",
          })),
          // A column that is never shown, whose filter is a test of the whole row.
          {id: "row", accessorFn: (row) => row, filterFn: (row, _, test) => test(row.original), enableSorting: false},
        ],
        initialState: {columnVisibility: {row: false}},
      });

      this.head = element("div", {role: "row", class: "grid-row grid-head", "aria-rowindex": 1});
      this.body = element("div", {role: "rowgroup", class: "grid-body"});
      this.sheet = element(
        "div",
        {role: "grid", class: "grid-sheet", "aria-label": options.label, "aria-multiselectable": true},
        element("div", {role: "rowgroup", class: "grid-headgroup"}, this.head),
        this.body,
      );
      this.scroller = element("div", {class: "grid-scroll"}, this.sheet);
      fill(host, this.scroller);

      this.sheet.addEventListener("keydown", (event) => this.#key(event));
      this.sheet.addEventListener("click", (event) => this.#click(event));
      this.sheet.addEventListener("focusin", (event) => this.#focused(event));

      this.visible = [];
      this.shownColumns = [];
      this.across = new Virtualizer(this.#acrossOptions());
      this.virtualizer = new Virtualizer(this.#virtual());
      const unmount = [this.across._didMount(), this.virtualizer._didMount()];
      this.destroy = () => unmount.forEach((one) => one());
      this.across._willUpdate();
      this.virtualizer._willUpdate();
    }

    #acrossOptions() {
      return {
        horizontal: true,
        count: this.visible.length,
        getScrollElement: () => this.scroller,
        estimateSize: (at) => this.visible[at].width,
        overscan: 1,
        scrollToFn: elementScroll,
        observeElementRect,
        observeElementOffset,
        initialRect: {width: 800, height: 600},
        // The name's column sticks; the one that holds the focus stays.
        rangeExtractor: (range) => inRange(range, [0, this.active.column]),
        onChange: () => this.#paint(),
      };
    }

    #virtual() {
      return {
        count: this.rows.length,
        getScrollElement: () => this.scroller,
        estimateSize: () => ROW_HEIGHT,
        overscan: 4,
        scrollMargin: this.head?.offsetHeight ?? 0,
        scrollPaddingStart: this.head?.offsetHeight ?? 0,
        scrollToFn: elementScroll,
        observeElementRect,
        observeElementOffset,
        initialRect: {width: 800, height: 600},
        // The row that holds the focus stays, wherever the table is scrolled to.
        rangeExtractor: (range) => inRange(range, [this.active.row]),
        onChange: () => this.#paint(),
      };
    }

    /** New rows, or the same ones with new values. */
    setRows(rows) {
      this.table.setOptions((options) => ({...options, data: rows}));
    }

    /** @param {string[]} ids Of the columns to show, in the order in which they were given to the constructor. */
    setVisible(ids) {
      const shown = new Set(ids);
      this.table.setColumnVisibility(
        Object.fromEntries([...this.columns.keys()].map((id) => [id, shown.has(id)]).concat([["row", false]])),
      );
    }

    setFilter(test) {
      this.table.setColumnFilters([{id: "row", value: test}]);
    }

    setSorting(sorting) {
      this.table.setSorting(sorting.filter(({id}) => this.columns.has(id)));
    }

    /** Work out rows and columns, and show them. */
    refresh() {
      this.rows = this.table.getRowModel().rows.map((row) => row.original);
      this.visible = this.table.getVisibleLeafColumns().map(({id}) => this.columns.get(id));
      this.sorting = this.table.atoms.sorting.get();
      this.version++;
      this.sheet.style.width = `${this.visible.reduce((sum, {width}) => sum + width, 0)}px`;
      this.sheet.setAttribute("aria-rowcount", this.rows.length + 1);
      this.sheet.setAttribute("aria-colcount", this.visible.length);
      this.active.row = Math.min(this.active.row, this.rows.length - 1);
      this.active.column = Math.min(this.active.column, this.visible.length - 1);
      // The first of the two reports a change before the second knows how many rows there are.
      this.refreshing = true;
      this.across.setOptions(this.#acrossOptions());
      this.across._willUpdate();
      this.across.measure();
      this.virtualizer.setOptions(this.#virtual());
      this.virtualizer._willUpdate();
      this.virtualizer.measure();
      this.refreshing = false;
      this.#paint();
    }

    /** Only what rows look like: which are picked. */
    repaint() {
      this.version++;
      this.#paint();
    }

    #paintHead() {
      const cells = this.shownColumns.map(({index, gap}) => {
        const column = this.visible[index];
        const place = this.sorting.findIndex(({id}) => id === column.id);
        const sorted = place < 0 ? "none" : this.sorting[place].desc ? "descending" : "ascending";
        const cell = element(
          "div",
          {
            role: "columnheader",
            class: `grid-cell${column.text ? " text" : ""}`,
            "aria-colindex": index + 1,
            "aria-sort": sorted,
            title: column.title ?? column.label,
            tabindex: this.#isActive(-1, index) ? 0 : -1,
            data: {column: index},
          },
          element("span", {class: "grid-label"}, element("bdi", {}, breakable(column.label))),
          element(
            "span",
            {class: "grid-unit"},
            typeof column.unit === "function" ? column.unit() : (column.unit ?? ""),
            place < 0
              ? null
              : element(
                  "span",
                  {class: "grid-arrow", "aria-hidden": true},
                  this.sorting[place].desc ? "↓" : "↑",
                  this.sorting.length > 1 ? element("sub", {}, place + 1) : null,
                ),
          ),
        );
        cell.style.width = `${column.width}px`;
        cell.style.marginLeft = `${gap}px`;
        return cell;
      });
      const focused = this.head.contains(document.activeElement);
      fill(this.head, cells);
      if (focused) this.#elementAt({row: -1, column: this.active.column})?.focus({preventScroll: true});
    }

    #paint() {
      if (!this.visible.length || this.refreshing) return;
      let end = 0;
      this.shownColumns = this.across.getVirtualItems().map((item) => {
        const gap = item.start - end;
        end = item.end;
        return {index: item.index, gap};
      });
      const columnKey = this.shownColumns.map(({index}) => index).join();
      if (this.headPainted !== `${this.version} ${columnKey}`) this.#paintHead();
      this.headPainted = `${this.version} ${columnKey}`;
      const items = this.virtualizer.getVirtualItems();
      const margin = this.virtualizer.options.scrollMargin;
      this.body.style.height = `${this.rows.length * ROW_HEIGHT}px`;
      const wanted = new Set(items.map((item) => item.index));
      for (const [index, row] of this.elements)
        if (!wanted.has(index)) {
          this.elements.delete(index);
          this.free.push(row);
          row.hidden = true;
        }
      for (const item of items) {
        let row = this.elements.get(item.index);
        if (!row) {
          row = this.free.pop() ?? this.#makeRow();
          row.hidden = false;
          row.painted = "";
          this.elements.set(item.index, row);
          row.style.transform = `translateY(${item.start - margin}px)`;
        }
        if (row.painted !== this.headPainted) this.#fillRow(row, item.index);
      }
      if (this.pendingFocus) this.#focus();
    }

    #makeRow() {
      const row = element("div", {role: "row", class: "grid-row"});
      this.body.append(row);
      return row;
    }

    #fillRow(row, index) {
      const {options, shownColumns} = this;
      const data = this.rows[index];
      row.painted = this.headPainted;
      row.dataset.row = index;
      row.setAttribute("aria-rowindex", index + 2);
      row.setAttribute("aria-selected", options.isPicked(data));
      row.className = `grid-row ${options.rowClass(data, this.rows[index - 1] ?? null, this.sorting)}`;
      while (row.childElementCount > shownColumns.length) row.lastElementChild.remove();
      while (row.childElementCount < shownColumns.length) row.append(this.#makeCell(row.childElementCount));
      shownColumns.forEach(({index: at, gap}, place) =>
        this.#fillCell(row.children[place], this.visible[at], data, index, at, gap),
      );
    }

    #makeCell(at) {
      const cell = element("div", {role: at === 0 ? "rowheader" : "gridcell", class: "grid-cell"});
      cell.main = element(at === 0 ? "a" : "span", {class: "grid-main", tabindex: at === 0 ? -1 : null});
      cell.name = at === 0 ? cell.main.appendChild(element("bdi")) : cell.main;
      cell.side = element("span", {class: "grid-side"});
      cell.marks = element("span", {class: "grid-marks"});
      cell.append(cell.main, cell.side, cell.marks);
      return cell;
    }

    #fillCell(cell, column, data, index, at, gap) {
      const shown = column.show(data);
      if (cell.column !== at || cell.of !== column) {
        cell.dataset.column = cell.column = at;
        cell.of = column;
        cell.setAttribute("aria-colindex", at + 1);
        cell.style.width = `${column.width}px`;
      }
      if (cell.gap !== gap) cell.style.marginLeft = `${(cell.gap = gap)}px`;
      cell.classList.toggle("text", Boolean(column.text));
      cell.tabIndex = this.#isActive(index, at) ? 0 : -1;
      const text = shown?.text ?? "";
      if (cell.name.textContent !== text) cell.name.textContent = text;
      if (at === 0) cell.main.setAttribute("href", shown.href);
      const side = shown?.side ?? "";
      if (cell.side.textContent !== side) cell.side.textContent = side;
      const title = shown?.title ?? "";
      if (cell.title !== title) cell.title = title;
      const marks = shown?.marks ?? [];
      if (marks.length || cell.marks.childElementCount)
        fill(
          cell.marks,
          marks.map(({symbol, title: what}) =>
            element(
              "span",
              {class: "mark-sign", title: what},
              element("span", {"aria-hidden": true}, symbol),
              visuallyHidden(` ${what}`),
            ),
          ),
        );
    }

    #isActive(row, column) {
      return this.active.row === row && this.active.column === column;
    }

    #cellOf(target) {
      const cell = target.closest?.("[data-column]");
      if (!cell) return null;
      const row = cell.closest("[data-row]");
      return {row: row ? Number(row.dataset.row) : -1, column: Number(cell.dataset.column)};
    }

    #elementAt({row, column}) {
      const place = this.shownColumns.findIndex(({index}) => index === column);
      return (row < 0 ? this.head : this.elements.get(row))?.children[place];
    }

    #focused(event) {
      const place = this.#cellOf(event.target);
      if (!place) return;
      const before = this.#elementAt(this.active);
      if (before) before.tabIndex = -1;
      this.active = place;
      const now = this.#elementAt(place);
      if (now) now.tabIndex = 0;
    }

    #click(event) {
      const place = this.#cellOf(event.target);
      if (!place) return;
      if (place.row < 0) this.#sort(place.column, event.shiftKey);
      else if (!event.target.closest("a")) this.options.onPick(this.rows[place.row]);
    }

    #sort(at, add) {
      const column = this.visible[at];
      const now = this.sorting.find(({id}) => id === column.id);
      const desc = now ? !now.desc : Boolean(column.descending);
      const next = add
        ? [...this.sorting.filter(({id}) => id !== column.id), {id: column.id, desc}]
        : [{id: column.id, desc}];
      this.options.onSort(next);
      announce(`Sorted by ${column.label}, ${desc ? "descending" : "ascending"}`);
    }

    #key(event) {
      if (event.altKey || event.metaKey) return;
      let {row, column} = this.active;
      const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW_HEIGHT) - 2);
      const last = {row: this.rows.length - 1, column: this.visible.length - 1};
      switch (event.key) {
        case "ArrowDown":
          row++;
          break;
        case "ArrowUp":
          row--;
          break;
        case "ArrowRight":
          column++;
          break;
        case "ArrowLeft":
          column--;
          break;
        case "PageDown":
          row += page;
          break;
        case "PageUp":
          row = row < 0 ? row : Math.max(0, row - page);
          break;
        case "Home":
          column = 0;
          if (event.ctrlKey) row = 0;
          break;
        case "End":
          column = last.column;
          if (event.ctrlKey) row = last.row;
          break;
        case "Enter":
          event.preventDefault();
          if (row < 0) this.#sort(column, event.shiftKey);
          else this.options.onOpen(this.rows[row]);
          return;
        case " ":
          event.preventDefault();
          if (row < 0) this.#sort(column, event.shiftKey);
          else this.options.onPick(this.rows[row]);
          return;
        default:
          return;
      }
      event.preventDefault();
      this.active = {row: Math.min(Math.max(row, -1), last.row), column: Math.min(Math.max(column, 0), last.column)};
      this.pendingFocus = true;
      if (this.active.row >= 0) this.virtualizer.scrollToIndex(this.active.row, {align: "auto"});
      // Both keep their ranges until an option changes: the active cell may be outside of them.
      this.across.setOptions(this.#acrossOptions());
      this.virtualizer.setOptions(this.#virtual());
      this.#paint();
    }

    #focus() {
      const cell = this.#elementAt(this.active);
      if (!cell) return;
      this.pendingFocus = false;
      cell.focus({preventScroll: true});
      // The name's column covers what scrolls under it.
      const covered = this.active.column === 0 ? 0 : this.visible[0].width;
      const [left, right] = [cell.offsetLeft - covered, cell.offsetLeft + cell.offsetWidth];
      if (this.active.column > 0 && left < this.scroller.scrollLeft) this.scroller.scrollLeft = left;
      else if (right > this.scroller.scrollLeft + this.scroller.clientWidth)
        this.scroller.scrollLeft = right - this.scroller.clientWidth;
    }
  }

  return {Grid};
})();
