/** Grafana's visualisations with the glue of their plugins, which are not on npm. */
import {
  applyNullInsertThreshold,
  type DataFrame,
  FieldType,
  getFieldDisplayValues,
  type GrafanaTheme2,
  nullToValue,
  type TimeRange,
} from '@grafana/data';
import { BigValue, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { fieldConfigOf } from './data';

export interface Drawn {
  panel: any;
  frames: DataFrame[];
  width: number;
  height: number;
  theme: GrafanaTheme2;
  timeRange: TimeRange;
}

export function Visualization(drawn: Drawn) {
  const { panel, frames } = drawn;
  if (panel.type === 'stat') {
    return <Stat {...drawn} />; // it shows the text for "no value" itself
  }
  if (!frames.some((frame) => frame.length)) {
    const { noValue } = panel.fieldConfig.defaults;
    return <Note text={noValue ?? 'No data'} empty={!noValue} />;
  }
  switch (panel.type) {
    case 'timeseries':
      return <Graph {...drawn} />;
    case 'table':
      return <Table {...drawn} />;
    default:
      return <Note text={`Not drawn: Grafana's ${panel.type} panel is not on npm.`} />;
  }
}

function Note({ text, empty }: { text: string; empty?: boolean }) {
  const style = { display: 'flex', height: '100%', alignItems: 'center', justifyContent: 'center', opacity: 0.7 };
  return (
    <div style={style} data-empty={empty || undefined}>
      {text}
    </div>
  );
}

function Stat({ panel, frames, width, height, theme, timeRange }: Drawn) {
  const { options } = panel;
  const getValues = () =>
    getFieldDisplayValues({
      fieldConfig: fieldConfigOf(panel),
      reduceOptions: options.reduceOptions,
      replaceVariables: (text) => text,
      theme,
      data: frames,
      sparkline: options.graphMode !== 'none',
      timeZone: 'utc',
    });
  const renderValue = ({ value, width, height, count }: any) => (
    <BigValue
      value={value.display}
      count={count}
      sparkline={value.sparkline ? { ...value.sparkline, timeRange } : undefined}
      colorMode={options.colorMode}
      graphMode={options.graphMode}
      justifyMode={options.justifyMode}
      textMode={options.textMode}
      percentChangeColorMode={options.percentChangeColorMode}
      wideLayout={options.wideLayout}
      text={options.text}
      width={width}
      height={height}
      theme={theme}
    />
  );
  return (
    <div data-empty={!frames.some((frame) => frame.length) || undefined}>
      <VizRepeater
        getValues={getValues}
        renderValue={renderValue}
        source={frames}
        width={width}
        height={height}
        orientation={options.orientation}
        itemSpacing={3}
        autoGrid
        renderCounter={0}
      />
    </div>
  );
}

function Graph({ panel, frames, width, height, timeRange }: Drawn) {
  // As prepareGraphableFields of the plugin: non-finite values become gaps, and colours follow the number of a series.
  let count = 0;
  const span = { refFieldPseudoMin: timeRange.from.valueOf(), refFieldPseudoMax: timeRange.to.valueOf() };
  const shown = frames
    .map((frame) => nullToValue(applyNullInsertThreshold({ frame, ...span })))
    .map((frame) => ({
      ...frame,
      fields: frame.fields.map((field) => {
        if (field.type !== FieldType.number) {
          return field;
        }
        const values = field.values.map((value) => (Number.isFinite(value) ? value : null));
        return { ...field, values, state: { ...field.state, seriesIndex: count++ } };
      }),
    }));
  const { legend } = panel.options;
  return (
    <TimeSeries {...{ frames: shown, timeRange, timeZone: 'utc', width, height, legend, options: panel.options }} />
  );
}

function Table({ panel, frames, width, height, timeRange }: Drawn) {
  const { options } = panel;
  return (
    <TableNG
      data={frames[0]}
      width={width}
      height={height}
      sortBy={options.sortBy}
      cellHeight={options.cellHeight}
      noHeader={!options.showHeader}
      showTypeIcons={options.showTypeIcons}
      fieldConfig={fieldConfigOf(panel)}
      enableVirtualization={false}
      timeRange={timeRange}
      structureRev={1}
    />
  );
}
