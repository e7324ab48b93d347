// On every page: the theme switch, keyboard shortcuts, and keys that move between the rows of tables.

const root = document.documentElement;
const theme = document.getElementById('theme');
const dialog = document.getElementById('keys');

/** Dispatches an event after the colours have changed, so that canvases are redrawn. */
const changed = () => document.dispatchEvent(new CustomEvent('themechange'));

theme.addEventListener('change', () => {
  if (theme.value) root.dataset.theme = theme.value;
  else delete root.dataset.theme;
  const age = theme.value ? 31536000 : 0;
  document.cookie = `offbook_theme=${theme.value}; path=/; max-age=${age}; samesite=strict`;
  changed();
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', changed);

document.getElementById('keys-open').addEventListener('click', () => dialog.showModal());

let row = -1;
function walk(by) {
  const rows = [...document.querySelectorAll('main table.rows tbody tr')].filter((candidate) => candidate.querySelector('a[href]'));
  if (!rows.length) return;
  row = Math.min(rows.length - 1, Math.max(0, row + by));
  rows[row].querySelector('a[href]').focus();
}

let before = '';
document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, select, textarea, dialog[open]')) return;
  const go = before === 'g' ? `g${event.key}` : event.key;
  before = event.key;
  const up = document.querySelectorAll('.crumbs a');
  const keys = {
    '?': () => dialog.showModal(),
    j: () => walk(1),
    k: () => walk(-1),
    gr: () => location.assign('/'),
    u: () => up.length && location.assign(up[up.length - 1].href),
  };
  if (!keys[go]) return;
  event.preventDefault();
  keys[go]();
});
