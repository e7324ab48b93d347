// Elements without markup: everything that comes from a model or a tool is text.

/** An element with properties, attributes and children. */
export function h(tag, props = {}, ...kids) {
  return filled(document.createElement(tag), props, kids);
}

/** The same for SVG; all props are attributes. */
export function s(tag, attrs = {}, ...kids) {
  const el = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attrs)) el.setAttribute(name, value);
  el.append(...kids.flat());
  return el;
}

function filled(el, props, kids) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name in el && name !== 'list') el[name] = value;
    else el.setAttribute(name, value);
  }
  el.append(...kids.flat());
  return el;
}

/** Canvas cannot read light-dark(): a custom property's colour, resolved through a real element. */
export function colour(name) {
  const el = h('i');
  el.style.color = `var(${name})`;
  document.body.append(el);
  const found = getComputedStyle(el).color;
  el.remove();
  return found;
}

/** The JSON that the server put into the page: <script type="application/json" id="...">. */
export function pageJson(id) {
  return JSON.parse(document.getElementById(id).textContent);
}
