// The token view: one tab stop a call, arrow keys move by token, a panel follows. Everything shown is text.

const panel = document.getElementById('token');
const answers = JSON.parse(document.getElementById('token-data').textContent);
const boxes = [...document.querySelectorAll('.tokens')];
const hint = panel.firstElementChild;
let current = null;

const signed = (value, places = 2) => (value < 0 ? '−' : '+') + Math.abs(value).toFixed(places);
const plain = (value, places) => value.toFixed(places).replace(/^-(0\.?0*)$/, '$1').replace('-', '−');
const small = (value) => (value === 0 ? '0' : value.toExponential(2).replaceAll('-', '−'));

/** White space by name, for those who hear it. */
function blank(text) {
  const names = { ' ': 'space', '\n': 'newline', '\t': 'tab' };
  return [...text].map((letter) => names[letter] ?? 'white space').join(' ') || 'empty';
}

function element(tag, className, ...kids) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...kids);
  return made;
}

function describe(answer, at) {
  const rows = [];
  const add = (name, value) => rows.push(element('dt', '', name), element('dd', '', value));
  const column = (name) => (Array.isArray(answer[name]) ? answer[name][at] : null);
  add('Call', String(answer.call));
  add('Token', `${at + 1} of ${answer.ids.length}`);
  add('Id', String(answer.ids[at]));
  if (answer.characters[at]) add('Part of', answer.characters[at]);
  if (answer.advantage !== undefined) {
    add('Advantage × weight', signed(answer.advantage));
    if (answer.weight !== 1) add('Weight', String(answer.weight));
  }
  if (column('recorded') !== null) add('Logprob, sampler', plain(answer.recorded[at], 4));
  if (column('logprob') !== null) add('Logprob, learner', plain(answer.logprob[at], 4));
  if (column('ratio') !== null) add('Ratio to sampler', plain(answer.ratio[at], 3));
  if (column('moved') !== null) add('Ratio by updates', plain(answer.moved[at], 3));
  if (column('entropy') !== null) add('Entropy', `${plain(answer.entropy[at], 2)} nats`);
  if (column('coefficient') !== null) add('d loss / d logprob', small(answer.coefficient[at]));
  const shared = answer.shared.find(([start, end]) => start <= at && at < end);
  if (shared) add('Target of calls', shared[2]);
  return rows;
}

function notes(answer, at) {
  const said = [];
  if (answer.kept && !answer.kept[at]) said.push('Not trained: outside the learner’s own top-k, top-p or min-p.');
  if (answer.clipped && answer.clipped[at]) said.push('Clipped: the ratio left its range, and the gradient was cut.');
  if (answer.constrained) said.push(`Recorded logprobs were not used: ${answer.constrained}.`);
  if (answer.why) said.push(`Not trained: ${answer.why}.`);
  return said.map((text) => element('p', 'hint', text));
}

function show(box, at, focus) {
  const tokens = box.children;
  at = Math.min(tokens.length - 1, Math.max(0, at));
  if (current) {
    current.classList.remove('cur');
    current.setAttribute('aria-selected', 'false');
    current.parentElement.removeAttribute('aria-activedescendant');
  }
  current = tokens[at];
  current.classList.add('cur');
  current.setAttribute('aria-selected', 'true');
  box.setAttribute('aria-activedescendant', current.id);
  const answer = answers[box.dataset.answer];
  const close = element('button', 'close', 'Close');
  close.type = 'button';
  close.addEventListener('click', hide);
  panel.classList.add('on');
  panel.replaceChildren(
    close,
    element('h3', '', JSON.stringify(current.textContent)),
    element('dl', '', ...describe(answer, at)),
    ...notes(answer, at),
  );
  if (focus) box.focus({ preventScroll: true });
  current.scrollIntoView({ block: 'nearest' });
  history.replaceState(null, '', `#${current.id}`);
}

function hide() {
  panel.classList.remove('on');
  panel.replaceChildren(hint);
}

/** The token nearest below (or above) on the next line. */
function line(box, by) {
  const from = current.getBoundingClientRect();
  const tokens = [...box.children];
  let best = null;
  for (let i = tokens.indexOf(current) + by; i >= 0 && i < tokens.length; i += by) {
    const place = tokens[i].getClientRects()[0];
    if (!place || Math.abs(place.top - from.top) < 4) continue;
    if (best && Math.abs(place.top - best.top) > 4) break;
    const away = Math.abs(place.left - from.left);
    if (!best || away < best.away) best = { i, away, top: place.top };
  }
  return best ? best.i : by > 0 ? tokens.length - 1 : 0;
}

function move(event) {
  const box = event.currentTarget;
  const inside = current && current.parentElement === box;
  const at = inside ? [...box.children].indexOf(current) : -1;
  const to = {
    ArrowRight: () => at + 1,
    ArrowLeft: () => (inside ? at - 1 : 0),
    ArrowDown: () => (inside ? line(box, 1) : 0),
    ArrowUp: () => (inside ? line(box, -1) : 0),
    Home: () => 0,
    End: () => box.children.length - 1,
  }[event.key];
  if (event.key === 'Escape') hide();
  if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  show(box, to(), false);
}

for (const box of boxes) {
  box.setAttribute('role', 'listbox');
  box.setAttribute('aria-orientation', 'horizontal');
  [...box.children].forEach((token, at) => {
    token.id = `t${box.dataset.answer}-${at}`;
    token.setAttribute('role', 'option');
    token.setAttribute('aria-selected', 'false');
    if (!token.textContent.trim()) token.setAttribute('aria-label', blank(token.textContent));
  });
  box.addEventListener('keydown', move);
  box.addEventListener('click', (event) => {
    if (event.target.parentElement === box) show(box, [...box.children].indexOf(event.target), true);
  });
}

const linked = location.hash && document.getElementById(location.hash.slice(1));
if (linked && linked.parentElement.matches('.tokens')) {
  show(linked.parentElement, [...linked.parentElement.children].indexOf(linked), false);
}
