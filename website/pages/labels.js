// A table or diagram that scrolls takes keys only if it can be focused. The theme puts a <nav> without a name into every block of code; a screen reader would list them all alike.
let blocks = 0;
new MutationObserver(() => {
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((nav) => nav.setAttribute("aria-label", `Code block ${++blocks}`));
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex]), .md-typeset p:not([tabindex]):has(> img[src$='.svg'])").forEach((wide) => wide.setAttribute("tabindex", "0"));
}).observe(document.documentElement, { childList: true, subtree: true });
