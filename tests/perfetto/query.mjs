// SPDX-License-Identifier: Apache-2.0
// Load a trace into Perfetto's trace processor, compiled to WebAssembly, and run SQL queries; results as JSON.
//
//   node query.mjs FOLDER TRACE < {"name": "select ..."} > {"name": [row, ...]}
//
// FOLDER holds trace_processor.wasm, engine_bundle.node.js (Perfetto's loader, written for a web worker) and
// engine.mjs (Perfetto's client). In a browser the two communicate over a message port; here they call each other.
import { readFileSync } from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";
import vm from "node:vm";

const [folder, trace] = process.argv.slice(2).map((name) => path.resolve(name));
const queries = JSON.parse(readFileSync(0, "utf8"));
const inFolder = (name) => path.join(folder, name);

// The parts of a web worker that the loader needs: a scope, and a synchronous way to read a file.
globalThis.WorkerGlobalScope = class {};
globalThis.self = { location: { href: pathToFileURL(inFolder("worker.js")).href } };
globalThis.XMLHttpRequest = class {
  open() {}
  send() {
    this.response = readFileSync(inFolder("trace_processor.wasm"));
  }
};
// The loader compiles a small module to test for 64-bit memories; our trace processor is the 32-bit build.
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
await new Promise((resolve) => setImmediate(resolve)); // the loader starts the processor in a microtask
const engine = new Engine();
self.onmessage({ data: engine.port });

await engine.resetTraceProcessor({ ingestFtraceInRawTable: false, analyzeTraceProtoContent: false });
await engine.parse(new Uint8Array(readFileSync(trace)));
await engine.notifyEof();
const results = {};
for (const [name, sql] of Object.entries(queries)) {
  const result = await engine.query(sql);
  const columns = result.columns();
  results[name] = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    results[name].push(Object.fromEntries(columns.map((column) => [column, row.get(column)])));
  }
}
process.stdout.write(JSON.stringify(results, (_, value) => (typeof value === "bigint" ? Number(value) : value)));
