/** The data of a panel: frames, transformed and with the panel's field configuration, as Grafana's panel runner does. */
import {
  applyFieldOverrides,
  cacheFieldDisplayNames,
  type DataFrame,
  FieldColorModeId,
  FieldConfigOptionsRegistry,
  type FieldConfigSource,
  type GrafanaTheme2,
  identityOverrideProcessor,
  standardTransformers,
  standardTransformersRegistry,
  ThresholdsMode,
  transformDataFrame,
} from '@grafana/data';
import { lastValueFrom } from 'rxjs';
import { transformV2 } from 'prometheus-results';
import { framesOf } from './frames';

// The defaults that each panel plugin declares in public/app/plugins/panel/*/module.tsx; the plugins are not on npm.
const GRAPH = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: 'none',
  barAlignment: 0,
  barWidthFactor: 0.6,
  showPoints: 'auto',
  pointSize: 5,
  stacking: { mode: 'none', group: 'A' },
  axisPlacement: 'auto',
  axisLabel: '',
  axisColorMode: 'text',
  axisBorderShow: false,
  axisCenteredZero: false,
  axisGridShow: true,
  scaleDistribution: { type: 'linear' },
  hideFrom: { legend: false, tooltip: false, viz: false },
  thresholdsStyle: { mode: 'off' },
  insertNulls: false,
  spanNulls: false,
};
const TABLE = { align: 'auto', cellOptions: { type: 'auto' }, inspect: false, footer: { reducers: [] } };
const PLUGIN: Record<string, any> = {
  timeseries: { color: { mode: FieldColorModeId.PaletteClassic }, custom: GRAPH },
  stat: { color: { mode: FieldColorModeId.Thresholds } },
  table: { color: { mode: FieldColorModeId.Thresholds }, custom: TABLE },
};
const THRESHOLDS = {
  mode: ThresholdsMode.Absolute,
  steps: [
    { value: -Infinity, color: 'green' },
    { value: 80, color: 'red' },
  ],
};

/** Register what Grafana's start registers. Some transformers have two names in `standardTransformers`. */
export function registerTransformers(): void {
  const byId = new Map(Object.values(standardTransformers).map((one: any) => [one.id, one]));
  standardTransformersRegistry.setInit(() =>
    [...byId.values()].map((one: any) => ({
      id: one.id,
      name: one.name,
      transformation: () => Promise.resolve(one),
      editor: null,
      imageDark: '',
      imageLight: '',
    })) as any,
  );
}

export function fieldConfigOf(panel: any): FieldConfigSource {
  const plugin = PLUGIN[panel.type] ?? {};
  const own = panel.fieldConfig?.defaults ?? {};
  const defaults = {
    thresholds: THRESHOLDS,
    mappings: [],
    ...plugin,
    ...own,
    custom: { ...plugin.custom, ...own.custom },
  };
  // JSON has no -Infinity: Grafana stores the first step's value as null.
  const steps = defaults.thresholds.steps.map((step: any) => ({ ...step, value: step.value ?? -Infinity }));
  defaults.thresholds = { ...defaults.thresholds, steps };
  return { defaults, overrides: panel.fieldConfig?.overrides ?? [] };
}

function registryOf(config: FieldConfigSource): FieldConfigOptionsRegistry {
  const known = new FieldConfigOptionsRegistry();
  const common = { process: identityOverrideProcessor, shouldApply: () => true, getItemsCount: () => 0 };
  const add = (id: string) => {
    if (!known.getIfExists(id)) {
      const isCustom = id.startsWith('custom.');
      const path = isCustom ? id.slice('custom.'.length) : id;
      known.register({ id, path, name: id, isCustom, editor: null, override: null, ...common } as any);
    }
  };
  const { custom = {}, ...standard } = config.defaults;
  Object.keys(standard).forEach(add);
  Object.keys(custom).forEach((id) => add(`custom.${id}`));
  config.overrides.flatMap((one) => one.properties).forEach((property) => add(property.id));
  return known;
}

/** Give the frames that Grafana would hand to the panel's plugin. */
export async function dataOf(panel: any, answers: any, theme: GrafanaTheme2): Promise<DataFrame[]> {
  const targets = panel.targets ?? [];
  const frames = targets.flatMap((target: any) => framesOf(target, answers[`${panel.id}/${target.refId}`]));
  const { data } = transformV2({ data: frames } as any, { targets } as any, {});
  const context = { interpolate: (text: string) => text };
  const transformed = await lastValueFrom(
    transformDataFrame(panel.transformations ?? [], data as DataFrame[], context),
  );
  const fieldConfig = fieldConfigOf(panel);
  const done = applyFieldOverrides({
    data: transformed,
    fieldConfig,
    fieldConfigRegistry: registryOf(fieldConfig),
    replaceVariables: (text) => text,
    theme,
    timeZone: 'utc',
  });
  cacheFieldDisplayNames(done); // TableNG reads the names from this cache
  return done;
}
