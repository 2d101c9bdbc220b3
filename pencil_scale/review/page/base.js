// What every part of the page uses: the data, unpacked; elements made of text, never of markup; numbers.

const DATA = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';
const byId = (id) => document.getElementById(id);

function unpack(column) {
  const bytes = Uint8Array.from(atob(column.data), (letter) => letter.charCodeAt(0));
  const kinds = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array };
  return new kinds[column.kind](bytes.buffer);
}

function add(parent, name, options = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === 'text') node.textContent = value;
    else if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children);
  if (parent) parent.append(node);
  return node;
}

function draw(parent, name, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

const whole = (number) => number.toLocaleString('en-US');
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const className = (number) => DATA.classes[number];
const shorter = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);

function cells(packed) {
  const [first, second, num] = ['first', 'second', 'num'].map((name) => unpack(packed[name]));
  return { first, second, num };
}

const S = (() => {
  const raw = DATA.samples;
  const found = { num: raw.id.length, id: raw.id, key: raw.key, row: raw.row, topK: raw.top_k };
  const columns = ['given_label', 'predicted_label', 'last_change_epoch', 'before', 'shard', 'top_labels'];
  for (const name of columns) found[name] = unpack(raw[name]);
  for (const name of ['label_score', 'confidence', 'margin', 'top_shares']) {
    found[name] = Float32Array.from(unpack(raw[name]), (value) => value / 65535);
  }
  found.shards = raw.shards;
  found.changed = (place) => found.given_label[place] !== found.predicted_label[place];
  return found;
})();

const TRACES = {
  epochs: DATA.traces.epochs,
  classes: unpack(DATA.traces.classes),
  confidence: unpack(DATA.traces.confidence),
  of(place) {
    const width = this.epochs.length;
    return Array.from({ length: width }, (_, step) => ({
      epoch: this.epochs[step],
      label: this.classes[place * width + step],
      share: this.confidence[place * width + step] / 255,
    }));
  },
  numMoves(place) {
    const width = this.epochs.length;
    let moves = 0;
    let before = S.given_label[place];
    for (let step = place * width; step < (place + 1) * width; step += 1) {
      if (this.classes[step] !== before) moves += 1;
      before = this.classes[step];
    }
    return moves;
  },
};
