/** What is wrong with the drawn page and where its graphs are, written to the console as REPORT lines. */
import { type DataFrame, FieldType, formattedValueToString } from '@grafana/data';

export interface Problem {
  panel: string;
  problem: string;
  details?: string;
}

const SMALLEST_TEXT_PX = 10;
const LEGEND = '[data-testid="data-testid viz-layout-legend"]';
const AROUND_TEXT_PX = 4; // of a line of a legend, above and below the letters

/** Where a graph is on the page, in pixels: left, top, right, bottom. */
export interface Graph {
  graph: string;
  box: [number, number, number, number];
}

export function report(found: Problem | Graph | { done: true }): void {
  console.error('REPORT ' + JSON.stringify(found));
}

export function check(): void {
  for (const panel of document.querySelectorAll<HTMLElement>('[data-panel]')) {
    const found: Array<[string, string[]]> = [
      ['empty', panel.querySelector('[data-empty]') ? ['no data'] : []],
      ['title cut', titles(panel).filter(isCut).map(textOf)],
      ['cells cut', cells(panel).filter(isCut).map(textOf)],
      ['legend cut', legendItems(panel).filter(isCutByScrolling).map(textOf)],
      ['columns out of view', columnsOutOfView(panel)],
      ['text too small', smallTexts(panel)],
    ];
    for (const [problem, details] of found.filter(([, details]) => details.length)) {
      report({ panel: panel.dataset.panel!, problem, details: details.slice(0, 5).join(' | ') });
    }
    for (const canvas of all(panel, 'canvas')) {
      const { left, top, right, bottom } = canvas.getBoundingClientRect();
      report({ graph: panel.dataset.panel!, box: [left, top, right, bottom] });
    }
  }
  report({ done: true });
}

/** Report labels that are formatted as if they were values: a unit turns the module "0" into "0 s". */
export function checkLabels(panel: string, frames: DataFrame[]): void {
  const labels = frames.flatMap((frame) => frame.fields).filter((field) => field.type === FieldType.string);
  for (const { name, values, display } of labels) {
    const shown = values.map((value) => [String(value ?? ''), display ? formattedValueToString(display(value)) : value]);
    const changed = shown.filter(([text, formatted]) => text !== formatted).map((pair) => pair.join(' as '));
    if (changed.length) {
      report({ panel, problem: 'label with a unit', details: `${name}: ${changed.slice(0, 3).join(' | ')}` });
    }
  }
}

const all = (inside: HTMLElement, selector: string) => [...inside.querySelectorAll<HTMLElement>(selector)];
const textOf = (element: HTMLElement) => element.innerText.trim();
const titles = (panel: HTMLElement) => all(panel, 'h2, h6');
const legendItems = (panel: HTMLElement) => all(panel, `${LEGEND} li, ${LEGEND} tr`);
const cells = (panel: HTMLElement) => all(panel, '[role=gridcell], [role=columnheader]');

/** Whether the text of an element is wider or higher than the element. */
function isCut(element: HTMLElement): boolean {
  const range = document.createRange();
  range.selectNodeContents(element);
  const [text, box] = [range.getBoundingClientRect(), element.getBoundingClientRect()];
  const outside = text.left < box.left - 1 || text.right > box.right + 1 || text.bottom > box.bottom + 1;
  return textOf(element) !== '' && (outside || element.scrollWidth > element.clientWidth + 1);
}

/** Whether the lower edge of a legend that scrolls goes through a line. Lines below the edge are in view after scrolling. */
function isCutByScrolling(item: HTMLElement): boolean {
  const edge = item.closest(LEGEND)!.getBoundingClientRect().bottom;
  const { top, bottom } = item.getBoundingClientRect();
  return top + AROUND_TEXT_PX < edge && bottom - AROUND_TEXT_PX > edge;
}

function columnsOutOfView(panel: HTMLElement): string[] {
  return all(panel, '[role=grid]').flatMap((grid) => {
    const { right } = grid.getBoundingClientRect();
    return all(grid, '[role=columnheader]')
      .filter((header) => header.getBoundingClientRect().right > right + 1)
      .map(textOf);
  });
}

function smallTexts(panel: HTMLElement): string[] {
  return all(panel, '*')
    .filter((element) => !element.children.length && textOf(element))
    .map((element) => [textOf(element), parseFloat(getComputedStyle(element).fontSize)] as const)
    .filter(([, size]) => size < SMALLEST_TEXT_PX)
    .map(([text, size]) => `${text}: ${size.toFixed(1)} px`);
}
