// Creates elements without parsing HTML, so that text of a model or a tool stays text.

/** Creates an HTML element with properties, attributes and children. */
export function h(tag, props = {}, ...kids) {
  return filled(document.createElement(tag), props, kids);
}

/** Creates an SVG element with attributes and children. */
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

/** The colour of a custom property, resolved by an element, because a canvas cannot evaluate light-dark(). */
export function colour(name) {
  const el = h('i');
  el.style.color = `var(${name})`;
  document.body.append(el);
  const resolved = getComputedStyle(el).color;
  el.remove();
  return resolved;
}

/** The JSON of <script type="application/json" id="..."> in the page. */
export function pageJson(id) {
  return JSON.parse(document.getElementById(id).textContent);
}
