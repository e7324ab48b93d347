// The charts of one or several runs. uPlot draws the lines; this file adds labels, keyboard control, tables and theme colours.
/* global uPlot */
import { colour, h, pageJson } from './dom.js';
import { follow } from './live_run.js';

const INKS = ['--pos', '--neg', '--third', '--fourth'];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2], [12, 5]];
const HEIGHT = 210; // pixels
const TABLE_ROWS = 20; // last values in a table
const BANDS_UP_TO = 2; // most lines that are drawn with bands

const $ = (id) => document.getElementById(id);
let runs = pageJson('chart-data');
const shown = new Set(runs.map((run) => run.run));
let plots = [];
let zoom = null;
let applying = false;

/** The debiased exponential moving average, with TensorBoard's formula. */
export function smoothed(values, weight) {
  let last = 0;
  return values.map((value, index) => {
    last = last * weight + (1 - weight) * value;
    return last / (1 - weight ** (index + 1));
  });
}

function short(value) {
  if (value === null || value === undefined) return '–';
  if (Number.isInteger(value)) return value.toLocaleString('en');
  const size = Math.abs(value);
  if (size < 1e-9) return '0';
  return size >= 1000 ? Math.round(value).toLocaleString('en') : size < 0.001 ? value.toExponential(1) : String(+value.toPrecision(4));
}

/** The lines of a chart: one per part and run. */
function linesOf(key) {
  const axis = $('axis').value;
  const several = runs.length > 1;
  const lines = [];
  runs.forEach((run, number) => {
    const chart = run.charts.find((candidate) => candidate.key === key);
    if (!chart || !shown.has(run.run)) return;
    chart.parts.forEach((part, partNumber) => {
      const x = run.x[part.x][axis];
      const known = part.y.map((value, index) => index).filter((index) => part.y[index] !== null);
      const index = several ? number * chart.parts.length + partNumber : partNumber;
      const name = chart.parts.length > 1 ? `${run.run}, ${part.label}` : run.run;
      lines.push({
        label: several ? name : part.label,
        ink: INKS[(several ? number : partNumber) % INKS.length],
        dash: DASHES[index % DASHES.length],
        x: known.map((position) => x[position]),
        y: known.map((position) => part.y[position]),
        spread: part.spread ? known.map((position) => part.spread[position] ?? 0) : null,
      });
    });
  });
  return lines;
}

function summary(chart, lines) {
  const changes = lines.map((line) => `${line.label} goes from ${short(line.y[0])} to ${short(line.y.at(-1))} in ${line.y.length} values`);
  return `${chart.title}, ${chart.unit}. ${changes.join('; ')}. Arrow keys read the values; the table below has them.`;
}

function draw() {
  plots.forEach(({ plot }) => plot.destroy());
  plots = [];
  $('smooth-out').value = (+$('smooth').value).toFixed(2);
  const keys = new Map();
  for (const run of runs) for (const chart of run.charts) if (!keys.has(chart.key)) keys.set(chart.key, chart);
  const open = new Set([...document.querySelectorAll('#charts details[open]')].map((details) => details.dataset.key));
  const focused = document.activeElement?.closest?.('.plot')?.dataset.key;
  $('charts').replaceChildren(...[...keys.values()].map((chart) => figure(chart, open.has(chart.key))));
  for (const box of document.querySelectorAll('#charts .plot')) {
    plotInto(box, keys.get(box.dataset.key));
    if (box.dataset.key === focused) box.focus();
  }
}

function figure(chart, open) {
  const lines = linesOf(chart.key);
  const box = h('div', { className: 'plot', tabIndex: 0, role: 'img', 'aria-label': summary(chart, lines) });
  box.dataset.key = chart.key;
  const values = h('details', { open }, h('summary', {}, 'Values as a table'), table(chart, lines));
  values.dataset.key = chart.key;
  const note = [chart.unit, chart.note].filter(Boolean).join('; ');
  return h('figure', {}, h('figcaption', {}, chart.title, h('small', {}, note)), box, values);
}

function table(chart, lines) {
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b).slice(-TABLE_ROWS);
  const valuesByX = lines.map((line) => new Map(line.x.map((x, index) => [x, line.y[index]])));
  const head = [$('axis').value, ...lines.map((line) => line.label)];
  const rows = xs.map((x) => h('tr', {}, h('th', { scope: 'row' }, short(x)), valuesByX.map((values) => h('td', {}, short(values.get(x))))));
  return h('div', { className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': `${chart.title}: the last values` },
    h('table', { className: 'rows' }, h('thead', {}, h('tr', {}, head.map((text) => h('th', { scope: 'col' }, text)))), h('tbody', {}, rows)));
}

function plotInto(box, chart) {
  const lines = linesOf(chart.key);
  if (!lines.length) {
    box.append(h('p', { className: 'hint' }, 'The runs that are shown have no values here.'));
    return;
  }
  const weight = +$('smooth').value;
  const banded = lines.filter((line) => line.spread).length <= BANDS_UP_TO;
  const series = [{ label: $('axis').value }];
  const tables = [];
  const bands = [];
  lines.forEach((line) => {
    const values = weight ? smoothed(line.y, weight) : line.y;
    const table = [line.x, values];
    const stroke = colour(line.ink);
    series.push({
      label: line.label, stroke, width: 2, dash: line.dash, spanGaps: true,
      points: { show: line.x.length < 3, size: 6, fill: stroke }, value: (_, value) => short(value),
    });
    if (weight) {
      table.push(line.y);
      series.push({ class: 'raw', stroke, alpha: 0.25, width: 1, spanGaps: true, points: { show: false } });
    } else if (line.spread && banded) {
      table.push(line.y.map((value, index) => value + line.spread[index]), line.y.map((value, index) => value - line.spread[index]));
      const edge = { class: 'raw', stroke, alpha: 0.2, width: 1, spanGaps: true, points: { show: false } };
      series.push(edge, { ...edge });
      bands.push({ series: [series.length - 2, series.length - 1], fill: faded(stroke) });
    }
    tables.push(table);
  });
  const soft = colour('--soft');
  const grid = { stroke: colour('--line'), width: 1 };
  const axis = { stroke: soft, grid, ticks: grid, font: '12px system-ui, sans-serif' };
  const time = $('axis').value === 'minutes';
  const plot = new uPlot({
    width: Math.max(200, box.clientWidth), height: HEIGHT, series, bands,
    cursor: { sync: { key: 'runs' }, drag: { x: true, y: false }, points: { size: 7 } },
    scales: { x: { time: false }, y: { range: (_, min, max) => (min === 0 && max === 0 ? [0, 1] : uPlot.rangeNum(min, max, 0.1, true)) } },
    axes: [
      { ...axis, size: 30, incrs: time ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] },
      { ...axis, size: 60, values: (_, values) => values.map(short) },
    ],
    legend: { markers: { dash: () => 'solid' } },
    hooks: { setScale: [(self, key) => key === 'x' && zoomed(self)] },
  }, uPlot.join(tables), box);
  const last = () => plot.data[0].length && plot.setLegend({ idx: plot.data[0].length - 1 });
  setTimeout(last, 50);
  plot.over.addEventListener('mouseleave', () => setTimeout(last, 50));
  box.onkeydown = (event) => read(event, plot, chart, series);
  plots.push({ plot, box });
  if (zoom) {
    applying = true;
    plot.setScale('x', zoom);
    applying = false;
  }
}

function faded(stroke) {
  const [red, green, blue] = stroke.match(/[\d.]+/g);
  return `rgba(${red}, ${green}, ${blue}, 0.12)`;
}

/** Applies the zoom of one chart to all others. */
function zoomed(self) {
  if (applying || self.status !== 1) return;
  const { min, max } = self.scales.x;
  const xs = self.data[0];
  zoom = min <= xs[0] && max >= xs.at(-1) ? null : { min, max };
  applying = true;
  for (const { plot } of plots) if (plot !== self) plot.setScale('x', zoom ?? { min: plot.data[0][0], max: plot.data[0].at(-1) });
  applying = false;
}

function reset() {
  zoom = null;
  applying = true;
  for (const { plot } of plots) plot.setScale('x', { min: plot.data[0][0], max: plot.data[0].at(-1) });
  applying = false;
}

/** Moves the cursor with the arrow keys, and announces the values to screen readers. */
function read(event, plot, chart, series) {
  const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
  if (!by) return;
  event.preventDefault();
  const xs = plot.data[0];
  const from = plot.cursor.idx ?? (by < 0 ? xs.length : -1);
  const index = Math.min(xs.length - 1, Math.max(0, from + by));
  const first = plot.data.slice(1).find((values) => values[index] !== null && values[index] !== undefined);
  plot.setCursor({ left: plot.valToPos(xs[index], 'x'), top: plot.valToPos(first?.[index] ?? 0, 'y') });
  const spoken = series.map((line, number) => [line, plot.data[number]?.[index]]).slice(1).filter(([line, value]) => line.label && value != null);
  $('spoken').textContent = `${chart.title}, ${$('axis').value} ${short(xs[index])}: ${spoken.map(([line, value]) => `${line.label} ${short(value)}`).join(', ')}`;
}

function chooser() {
  if (runs.length < 2) return;
  $('shown').hidden = false;
  $('shown').append(...runs.map((run) => {
    const box = h('input', { type: 'checkbox', checked: true });
    box.onchange = () => {
      if (box.checked) shown.add(run.run);
      else shown.delete(run.run);
      draw();
    };
    return h('label', {}, box, run.run);
  }));
}

$('smooth').addEventListener('input', draw);
$('axis').addEventListener('change', () => {
  zoom = null;
  draw();
});
$('reset').addEventListener('click', reset);
document.addEventListener('themechange', draw);
let timer;
let width = innerWidth;
addEventListener('resize', () => {
  if (innerWidth === width) return;
  width = innerWidth;
  clearTimeout(timer);
  timer = setTimeout(draw, 100);
});

chooser();
draw();
follow(runs, (fresh) => {
  runs = fresh;
  draw();
});
