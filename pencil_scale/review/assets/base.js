// Shared by all parts of the page: the unpacked data; elements made of text, never of markup; number formats.

const DATA = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';
const byId = (id) => document.getElementById(id);

function unpack(column) {
  const text = atob(column.data);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place += 1) bytes[place] = text.charCodeAt(place);
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

const spelled = new Intl.NumberFormat('en-US');
const whole = (number) => spelled.format(number);
const many = (number, thing) => `${whole(number)} ${thing}${number === 1 ? '' : 's'}`;
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const className = (number) => DATA.classes[number];

// Names often start or end alike, so a long one is shortened in the middle.
function shorter(text, most) {
  const letters = Array.from(text);
  if (letters.length <= most) return text;
  const tail = Math.floor((most - 1) / 2);
  return `${letters.slice(0, most - 1 - tail).join('')}…${letters.slice(-tail).join('')}`;
}

// Short names of the classes, no two alike: those that would be have their numbers.
const shortNames = new Map();
function shortName(number, most) {
  if (!shortNames.has(most)) {
    const short = DATA.classes.map((name) => shorter(name, most));
    const counts = new Map();
    for (const name of short) counts.set(name, (counts.get(name) || 0) + 1);
    const numbered = (place) => `#${place} ${shorter(className(place), most - 2 - String(place).length)}`;
    shortNames.set(most, short.map((name, place) => (counts.get(name) === 1 ? name : numbered(place))));
  }
  return shortNames.get(most)[number];
}

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
    found[name] = new Float32Array(unpack(raw[name]));
    for (let place = 0; place < found[name].length; place += 1) found[name][place] /= 65535;
  }
  found.shards = raw.shards;
  found.member = (place) => `${raw.key[place] ?? raw.id[place]}.${raw.suffixes[found.shard[place]]}`;
  found.changed = (place) => found.given_label[place] !== found.predicted_label[place];
  return found;
})();

// Files count epochs from 0; the page counts from 1, as the console does.
for (const one of DATA.epochs) one.epoch += 1;

const TRACES = {
  epochs: DATA.traces.epochs.map((epoch) => epoch + 1),
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
