// The token view: each call is one tab stop, arrow keys move between tokens, and a panel shows the current token's numbers.
// No text is parsed as HTML.

const panel = document.getElementById('token');
const answers = JSON.parse(document.getElementById('token-data').textContent);
const boxes = [...document.querySelectorAll('.tokens')];
const hint = panel.firstElementChild;
let current = null;

const signed = (value, places = 2) => (value < 0 ? '−' : '+') + Math.abs(value).toFixed(places);
const plain = (value, places) => value.toFixed(places).replace(/^-(0\.?0*)$/, '$1').replace('-', '−');
const small = (value) => (value === 0 ? '0' : value.toExponential(2).replaceAll('-', '−'));

/** The names of white space, for screen readers. */
function blank(text) {
  const names = { ' ': 'space', '\n': 'newline', '\t': 'tab' };
  return [...text].map((letter) => names[letter] ?? 'white space').join(' ') || 'empty';
}

function element(tag, className, ...kids) {
  const el = document.createElement(tag);
  if (className) el.className = className;
  el.append(...kids);
  return el;
}

function describe(answer, index) {
  const rows = [];
  const add = (name, value) => rows.push(element('dt', '', name), element('dd', '', value));
  const column = (name) => (Array.isArray(answer[name]) ? answer[name][index] : null);
  add('Call', String(answer.call));
  add('Token', `${index + 1} of ${answer.ids.length}`);
  add('Id', String(answer.ids[index]));
  if (answer.advantage !== undefined) {
    add('Advantage × weight', signed(answer.advantage));
    if (answer.weight !== 1) add('Weight', String(answer.weight));
  }
  if (column('recorded') !== null) add('Logprob, sampler', plain(answer.recorded[index], 4));
  if (column('logprob') !== null) add('Logprob, learner', plain(answer.logprob[index], 4));
  if (column('ratio') !== null) add('Ratio to sampler', plain(answer.ratio[index], 3));
  if (column('moved') !== null) add('Ratio by updates', plain(answer.moved[index], 3));
  if (column('entropy') !== null) add('Entropy', `${plain(answer.entropy[index], 2)} nats`);
  if (column('coefficient') !== null) add('d loss / d logprob', small(answer.coefficient[index]));
  return rows;
}

function notes(answer, index) {
  const texts = [];
  if (answer.kept && !answer.kept[index]) texts.push('Not trained: outside the learner’s own top-k, top-p or min-p.');
  if (answer.clipped && answer.clipped[index]) texts.push('Clipped: the ratio is outside its range, which limits the token’s gradient.');
  if (answer.constrained) texts.push(`Recorded logprobs were not used: ${answer.constrained}.`);
  if (answer.why) texts.push(`Not trained: ${answer.why}.`);
  return texts.map((text) => element('p', 'hint', text));
}

function show(box, index, focus) {
  const tokens = box.children;
  index = Math.min(tokens.length - 1, Math.max(0, index));
  if (current) {
    current.classList.remove('cur');
    current.setAttribute('aria-selected', 'false');
    current.parentElement.removeAttribute('aria-activedescendant');
  }
  current = tokens[index];
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
    element('dl', '', ...describe(answer, index)),
    ...notes(answer, index),
  );
  if (focus) box.focus({ preventScroll: true });
  current.scrollIntoView({ block: 'nearest' });
  history.replaceState(null, '', `#${current.id}`);
}

function hide() {
  panel.classList.remove('on');
  panel.replaceChildren(hint);
}

/** The index of the nearest token on the line below (`by` = 1) or above (-1). */
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
  const index = inside ? [...box.children].indexOf(current) : -1;
  const to = {
    ArrowRight: () => index + 1,
    ArrowLeft: () => (inside ? index - 1 : 0),
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
  [...box.children].forEach((token, index) => {
    token.id = `t${box.dataset.answer}-${index}`;
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
