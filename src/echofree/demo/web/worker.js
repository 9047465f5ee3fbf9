// The canceller in a worker: hops in, hops out, the time that each took. Files come as a whole, live sound through a port.

import * as ort from "./ort/ort.js";
import { Canceller, checkContract } from "./canceller.js";

const TOGETHER = 16; // hops that go back in one message
const TOO_MANY = 64; // hops that wait before the page is told
const beside = (name) => new URL(name, import.meta.url).href;
ort.env.wasm.numThreads = 1; // the steps of one stream are too small to share
ort.env.wasm.wasmPaths = { mjs: beside("ort/ort-wasm.js"), wasm: beside("ort/ort-wasm.wasm") };
ort.env.logLevel = "error";
let contract, session, initial;
let finish = null; // ends the live take

// A stream through the graph: owns the states and feeds them back.
class Runner {
  constructor() {
    this.inputs = Object.values(contract.inputs).map((shape) => new Float32Array(shape.reduce((a, b) => a * b, 1)));
    this.feeds = {};
    Object.entries(contract.inputs).forEach(([name, shape], i) => { this.feeds[name] = new ort.Tensor("float32", this.inputs[i], shape); });
    let at = 0;
    for (const { input, shape } of contract.states) {
      const size = shape.reduce((a, b) => a * b, 1);
      this.feeds[input] = new ort.Tensor("float32", initial ? initial.slice(at, at + size) : new Float32Array(size), shape);
      at += size;
    }
  }

  async run() {
    const made = await session.run(this.feeds);
    for (const { input, output } of contract.states) this.feeds[input] = made[output];
    return made[contract.output].data;
  }
}

async function fetched(name) {
  const answer = await fetch(beside(name));
  if (!answer.ok) throw new Error(`${name}: ${answer.status} ${answer.statusText}`);
  return answer;
}

async function load() {
  contract = await (await fetched("artifact/contract.json")).json();
  checkContract(contract);
  let size = 0;
  if (contract.engine === "onnxruntime") {
    const bytes = await (await fetched(`artifact/${contract.file}`)).arrayBuffer();
    size = bytes.byteLength;
    session = await ort.InferenceSession.create(new Uint8Array(bytes), { executionProviders: ["wasm"] });
    if (contract.initial) initial = new Float32Array(await (await fetched(`artifact/${contract.initial}`)).arrayBuffer());
  }
  await warm();
  postMessage({ kind: "loaded", contract, size });
}

const fresh = () => new Canceller(contract, session ? new Runner() : null);

// The first hops cost more than the others: compilers start late.
async function warm() {
  const canceller = fresh();
  for (let h = 0; h < 40; h++) await canceller.hopOf(Float32Array.from({ length: canceller.hop }, Math.random), Float32Array.from({ length: canceller.hop }, Math.random));
}

// Collects hops and sends them in parts. What comes first belongs before the start and is left out.
class Outbox {
  constructor(canceller, live) {
    Object.assign(this, { canceller, live, hop: canceller.hop, early: canceller.latency - canceller.hop });
    this.clear();
  }

  clear() {
    this.out = [];
    this.times = [];
    this.heard = [[], []];
  }

  async take(mic, far) {
    const begin = performance.now(), out = await this.canceller.hopOf(mic, far);
    this.times.push(performance.now() - begin);
    const skip = Math.min(this.early, out.length);
    this.early -= skip;
    this.out.push(out.slice(skip));
    if (this.live) [mic, far].forEach((wave, i) => this.heard[i].push(wave));
    if (this.times.length === TOGETHER) this.send();
  }

  send() {
    const [mic, far] = this.heard.map(joined);
    postMessage({ kind: "part", out: joined(this.out), times: this.times, mic, far });
    this.clear();
  }

  end() {
    this.send();
    postMessage({ kind: "done", flags: this.canceller.flags() });
  }
}

function joined(parts) {
  const all = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => { all.set(part, at); return at + part.length; }, 0);
  return all;
}

async function files({ mic, far }) {
  const canceller = fresh(), outbox = new Outbox(canceller, false), { hop, latency } = canceller;
  const count = Math.ceil((mic.length + latency - hop) / hop);
  const cut = (wave, h) => {
    const part = new Float32Array(hop);
    part.set(wave.subarray(h * hop, (h + 1) * hop));
    return part;
  };
  for (let h = 0; h < count; h++) await outbox.take(cut(mic, h), cut(far, h));
  outbox.end();
}

// Hops come from the audio thread, wait in a row, and are worked on in turn.
function live(port) {
  const canceller = fresh(), outbox = new Outbox(canceller, true), row = [];
  let busy = false, told = false;
  const work = async () => {
    busy = true;
    while (row.length) {
      const next = row.shift();
      if (next === "end") {
        port.close();
        finish = null;
        for (let owed = canceller.latency - canceller.hop; owed > 0; owed -= canceller.hop) await outbox.take(new Float32Array(canceller.hop), new Float32Array(canceller.hop));
        outbox.end();
      } else await outbox.take(next.mic, next.far);
      if (row.length > TOO_MANY && !told) {
        told = true;
        postMessage({ kind: "slow", seconds: (row.length * canceller.hop) / canceller.rateHz });
      }
    }
    busy = false;
  };
  const take = (next) => {
    row.push(next);
    if (!busy) work().catch(failed);
  };
  port.onmessage = ({ data }) => take(data);
  finish = () => take("end");
}

const failed = (error) => postMessage({ kind: contract && (session || contract.engine === "none") ? "failed" : "broken", why: String(error?.message ?? error) });

onmessage = ({ data }) => {
  if (data.kind === "load") load().catch((error) => postMessage({ kind: "broken", why: String(error?.message ?? error) }));
  else if (data.kind === "files") files(data).catch(failed);
  else if (data.kind === "live") live(data.port);
  else if (data.kind === "end") finish?.();
};
