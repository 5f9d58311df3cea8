// Elements, and bringing the page up to date in place: what a person has focused, selected or scrolled stays as it is.

/** An element. Attributes that are null or false are left out, and so are children that are null. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  set(node, attributes);
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, attributes);
  node.append(...children);
  return node;
}

function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes))
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
}

/** Make the children of `parent` say what `wanted` says; only what differs is touched. */
export function fill(parent, wanted) {
  const present = [...parent.childNodes],
    kept = wanted.filter(node => node !== null);
  kept.forEach((node, place) => (place < present.length ? become(present[place], node) : parent.append(node)));
  present.slice(kept.length).forEach(node => node.remove());
}

/** Elements of different kinds or `data-key` are different things: the one takes the other's place. */
function become(node, wanted) {
  if (node.nodeName !== wanted.nodeName || node.dataset?.key !== wanted.dataset?.key) node.replaceWith(wanted);
  else if (node.nodeType === Node.TEXT_NODE) {
    if (node.data !== wanted.data) node.data = wanted.data;
  } else {
    for (const {name} of [...node.attributes]) if (!wanted.hasAttribute(name)) node.removeAttribute(name);
    for (const {name, value} of wanted.attributes) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
    fill(node, [...wanted.childNodes]);
  }
}
