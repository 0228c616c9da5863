// What the page uses of its libraries, as one classic script: modules do not load from file://.
export {
  binX,
  cell,
  dot,
  legend,
  lineY,
  plot,
  pointer,
  rect,
  rectY,
  ruleX,
  ruleY,
  text,
  tickX,
  tip,
} from "@observablehq/plot";
export {brush} from "d3-brush";
export {select} from "d3-selection";
export {Virtualizer, elementScroll, observeElementOffset, observeElementRect} from "@tanstack/virtual-core";
export {
  columnFilteringFeature,
  columnVisibilityFeature,
  constructTable,
  createFilteredRowModel,
  createSortedRowModel,
  rowSortingFeature,
  tableFeatures,
} from "@tanstack/table-core";
export {storeReactivityBindings} from "@tanstack/table-core/store-reactivity-bindings";
