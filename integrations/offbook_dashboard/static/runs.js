// Enables the button that compares runs once two are selected.
import { h } from './dom.js';

const form = document.getElementById('compare');
if (form) {
  const button = document.getElementById('compare-go');
  const hint = document.getElementById('compare-hint');
  const count = () => form.querySelectorAll('input[name=run]:checked').length;
  const shown = () => {
    button.disabled = count() < 2;
    hint.replaceChildren(count() < 2 ? 'Tick two or more runs.' : h('strong', {}, `${count()} runs ticked`));
  };
  form.addEventListener('change', shown);
  addEventListener('pageshow', shown);
  shown();
}
