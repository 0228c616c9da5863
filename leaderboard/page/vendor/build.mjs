// Makes libraries.js, LICENSES.txt and manifest.json from the packages that package-lock.json pins.
//
// Run it with `npm run build` after a change of package.json and `npm install --ignore-scripts --package-lock-only`.
// The three files are committed, so that building the site needs neither npm nor a network.

import {createHash} from "node:crypto";
import {readFileSync, readdirSync, writeFileSync} from "node:fs";
import {join, relative, sep} from "node:path";
import * as esbuild from "esbuild";

const here = import.meta.dirname;
const built = await esbuild.build({
  absWorkingDir: here,
  entryPoints: ["entry.mjs"],
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "libraries",
  target: ["es2020"],
  charset: "utf8",
  legalComments: "none",
  metafile: true,
  write: false,
});

const script = built.outputFiles[0].contents;
const lock = JSON.parse(readFileSync(join(here, "package-lock.json"), "utf8"));

// The packages that gave at least one byte.
const bytes = new Map();
for (const [path, {bytesInOutput}] of Object.entries(Object.values(built.metafile.outputs)[0].inputs)) {
  const found = /^node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(relative(here, join(here, path)).split(sep).join("/"));
  if (found && bytesInOutput > 0) bytes.set(found[1], (bytes.get(found[1]) ?? 0) + bytesInOutput);
}

const packages = [];
const licences = [];
for (const name of [...bytes.keys()].sort()) {
  const folder = join(here, "node_modules", name);
  const {version, license} = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
  if (!file) throw new Error(`${name} ${version} has no licence file: add its text by hand or drop the package.`);
  const {integrity} = lock.packages[`node_modules/${name}`];
  packages.push({name, version, license, integrity, bytes: bytes.get(name)});
  licences.push(`${name} ${version}\n\n${readFileSync(join(folder, file), "utf8").trim()}\n`);
}

const text = licences.join(`\n${"-".repeat(78)}\n\n`);
const sha256 = (data) => createHash("sha256").update(data).digest("hex");
const manifest = {
  esbuild: esbuild.version,
  files: {"libraries.js": {bytes: script.length, sha256: sha256(script)}, "LICENSES.txt": {sha256: sha256(text)}},
  packages,
};
writeFileSync(join(here, "libraries.js"), script);
writeFileSync(join(here, "LICENSES.txt"), text);
writeFileSync(join(here, "manifest.json"), `${JSON.stringify(manifest, null, 2)}\n`);
console.log(`libraries.js: ${script.length} bytes of ${packages.length} packages`);
