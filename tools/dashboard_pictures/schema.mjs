// Check dashboards against the types that Grafana itself has of them: node schema.mjs DASHBOARD.json…
//
// @grafana/schema has the types of dashboards and of each panel's options and field settings, and no JSON schemas, so
// these are generated. A line is printed for each thing that does not fit; the exit code is then 1.
import Ajv from 'ajv';
import { existsSync, readFileSync } from 'node:fs';
import { basename, dirname, join } from 'node:path';
import { createGenerator } from 'ts-json-schema-generator';
import { fileURLToPath } from 'node:url';

const FOLDER = dirname(fileURLToPath(import.meta.url));
const TYPES = join(FOLDER, 'node_modules/@grafana/schema/dist/types/raw');
const COMPILER = { moduleResolution: 'bundler', module: 'esnext', target: 'esnext', skipLibCheck: true };
const ajv = new Ajv({ strict: false, allErrors: true });
const known = new Map();

/** Return what checks values of a type, or null if Grafana has no such type. */
function validator(path, type) {
  const file = join(TYPES, path, 'types.gen.d.ts');
  const key = `${file} ${type}`;
  if (!known.has(key)) {
    known.set(key, isDeclared(file, type) ? ajv.compile(schemaOf(file, type)) : null);
  }
  return known.get(key);
}

function isDeclared(file, type) {
  return existsSync(file) && new RegExp(`(interface|type) ${type}\\b`).test(readFileSync(file, 'utf8'));
}

function schemaOf(path, type) {
  // The type of a dashboard lacks properties of variables that Grafana reads, such as the `auto` of an interval.
  const additionalProperties = type === 'Dashboard';
  return createGenerator({ path, type, additionalProperties, skipTypeCheck: true, compilerOptions: COMPILER }).createSchema(type);
}

/** Return the problems of a value, each once. What is missing is none: Grafana fills in its defaults. */
function problems(validate, value) {
  if (validate === null || validate(value)) {
    return [];
  }
  const errors = validate.errors.filter((error) => error.keyword !== 'required');
  return [...new Set(errors.map(({ instancePath, message, params }) => {
    return `${instancePath.replace(/\/\d+/g, '/n')} ${message} ${JSON.stringify(params)}`;
  }))];
}

function* panelsOf(panels) {
  for (const panel of panels ?? []) {
    yield panel;
    yield* panelsOf(panel.panels);
  }
}

let found = 0;
for (const file of process.argv.slice(2)) {
  const board = JSON.parse(readFileSync(file, 'utf8'));
  const report = (where, texts) => {
    found += texts.length;
    texts.forEach((text) => console.log(`${basename(file)}: ${where}: ${text}`));
  };
  report('dashboard', problems(validator('dashboard/x', 'Dashboard'), board));
  for (const panel of panelsOf(board.panels)) {
    const types = `composable/${panel.type}/panelcfg/x`;
    const fields = panel.fieldConfig?.defaults?.custom ?? {};
    report(`options of ${panel.title}`, problems(validator(types, 'Options'), panel.options ?? {}));
    report(`fields of ${panel.title}`, problems(validator(types, 'FieldConfig'), fields));
  }
}
process.exit(found ? 1 : 0);
