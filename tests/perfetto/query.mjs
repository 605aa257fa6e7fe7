// SPDX-License-Identifier: Apache-2.0
// Loads a trace into Perfetto's own trace processor, compiled to WebAssembly, and answers SQL queries as JSON.
//
//   node query.mjs FOLDER TRACE < {"name": "select ..."} > {"name": [row, ...]}
//
// FOLDER holds trace_processor.wasm, engine_bundle.node.js (Perfetto's loader of it, made for a web worker) and
// engine.mjs (Perfetto's client of it). In a browser the two talk over a message port; here they call each other.
import { readFileSync } from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";
import vm from "node:vm";

const [folder, trace] = process.argv.slice(2).map((name) => path.resolve(name));
const queries = JSON.parse(readFileSync(0, "utf8"));
const inFolder = (name) => path.join(folder, name);

// What the loader needs of a worker: a scope, and a way to read a file at once.
globalThis.WorkerGlobalScope = class {};
globalThis.self = { location: { href: pathToFileURL(inFolder("worker.js")).href } };
globalThis.XMLHttpRequest = class {
  open() {}
  send() {
    this.response = readFileSync(inFolder("trace_processor.wasm"));
  }
};
// It asks with a module of a few bytes whether memories may be 64 bits wide; the module that we have is 32 bits wide.
const { Module } = WebAssembly;
WebAssembly.Module = class extends Module {
  constructor(bytes) {
    if (bytes.length === 23 && bytes[12] === 4) throw new Error("32 bits only");
    super(bytes);
  }
};
console.log = console.warn = (line) => process.stderr.write(`${line}\n`);

const { EngineBase } = await import(pathToFileURL(inFolder("engine.mjs")));
class Engine extends EngineBase {
  id = "test";
  mode = "WASM";
  port = { postMessage: (reply) => this.onRpcResponseBytes(reply) };
  rpcSendRequestBytes(request) {
    this.port.onmessage({ data: request });
  }
}
vm.runInThisContext(readFileSync(inFolder("engine_bundle.node.js"), "utf8"));
await new Promise((resolve) => setImmediate(resolve)); // it starts the processor in a microtask of its own
const engine = new Engine();
self.onmessage({ data: engine.port });

await engine.resetTraceProcessor({ ingestFtraceInRawTable: false, analyzeTraceProtoContent: false });
await engine.parse(new Uint8Array(readFileSync(trace)));
await engine.notifyEof();
const answers = {};
for (const [name, sql] of Object.entries(queries)) {
  const result = await engine.query(sql);
  const columns = result.columns();
  answers[name] = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    answers[name].push(Object.fromEntries(columns.map((column) => [column, row.get(column)])));
  }
}
process.stdout.write(JSON.stringify(answers, (_, value) => (typeof value === "bigint" ? Number(value) : value)));
