// Updates the page of an active run: fetches its state every few seconds, and shows changes without a reload.
import { h } from './dom.js';

// Milliseconds between requests, while a run is active and while none is.
const ACTIVE = 3000;
const QUIET = 20000;

/** Calls `changed` with the newest data of all runs when the data of any of them changes. */
export function follow(runs, changed) {
  if (!runs.some((run) => run.live)) return;
  let newest = runs;
  const ask = async () => {
    if (!document.hidden) {
      const answers = await Promise.all(newest.map(fresh));
      if (answers.some((answer, index) => answer.version !== newest[index].version)) {
        newest = answers;
        changed(newest);
        if (newest.length === 1) show(newest[0]);
      } else if (newest.length === 1 && answers[0].status) badge(answers[0].status);
    }
    setTimeout(ask, newest.some((run) => run.active) ? ACTIVE : QUIET);
  };
  setTimeout(ask, ACTIVE);
}

/** The current data of a run; the previous data if the server does not answer. */
async function fresh(run) {
  try {
    const answer = await fetch(`/pages/data${run.url}`);
    return answer.ok ? await answer.json() : run;
  } catch {
    return run;
  }
}

function badge(status) {
  const el = document.getElementById('status');
  el.className = `badge ${status.kind}`;
  el.textContent = `${status.mark} ${status.text}`;
}

function show(run) {
  if (!run.facts) return;
  badge(run.status);
  document.getElementById('facts').replaceChildren(...run.facts.map((fact) =>
    h('div', {}, h('dt', {}, fact.name), h('dd', {}, fact.value, fact.note ? h('small', {}, fact.note) : ''))));
  const warnings = document.getElementById('warnings');
  warnings.hidden = !run.warnings.length;
  warnings.replaceChildren(...run.warnings.map((warned) => h('li', {},
    h('strong', {}, warned.step === null ? 'Update:' : `Step ${warned.step}:`), ` ${warned.text}`,
    warned.times > 1 ? h('small', {}, ` (${warned.times} times)`) : '')));
  const body = document.querySelector('#steps tbody');
  if (!body) {
    if (run.lines.length) location.reload(); // after the first step, because the page has no table yet
    return;
  }
  if (new URLSearchParams(location.search).has('at')) return;
  body.replaceChildren(...run.lines.map((line) => h('tr', {},
    h('th', { scope: 'row' }, h('a', { href: line.url }, line.step)),
    line.cells.map((cell) => h('td', { className: 'num' }, cell)),
    h('td', {}, line.state ? h('span', { className: 'badge warn' }, line.state) : ''))));
}
