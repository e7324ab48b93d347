// The page of a step: brackets open the previous and next step, bars of the timeline open their rollouts.

document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, select, textarea, dialog[open]')) return;
  const rel = { '[': 'prev', ']': 'next' }[event.key];
  const link = rel && document.querySelector(`.walk a[rel=${rel}]`);
  if (link) location.assign(link.href);
});

document.querySelector('.timeline')?.addEventListener('click', (event) => {
  const url = event.target.dataset?.url;
  if (url) location.assign(url);
});
