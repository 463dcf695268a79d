/** Bundle the page: node bundle.mjs FOLDER writes FOLDER/main.js and FOLDER/main.css. */
import { build } from 'esbuild';

const here = import.meta.dirname;
await build({
  entryPoints: [`${here}/page/main.tsx`],
  outdir: process.argv[2],
  bundle: true,
  format: 'iife',
  jsx: 'automatic',
  target: 'es2022',
  logLevel: 'error',
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
  loader: { '.woff2': 'dataurl', '.woff': 'dataurl', '.svg': 'dataurl', '.ttf': 'dataurl' },
  // The package does not export this file, and a path is not subject to its list of exports.
  alias: { 'prometheus-results': `${here}/node_modules/@grafana/prometheus/dist/esm/result_transformer.mjs` },
});
